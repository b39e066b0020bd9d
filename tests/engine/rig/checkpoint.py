"""A generated checkpoint in which KV matters: weights of standard deviation 0.2 and more, so that a wrong block shows.

vLLM's dummy weights (1e-3 and less) cannot tell: zeroing a third of the KV changes no token. Written with numpy alone:
a safetensors file is a length, a JSON table and the tensors' bytes.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

VOCAB: Final = 512
HIDDEN: Final = 64
HEADS: Final = 2
HEAD_DIM: Final = 32
LAYERS: Final = 2
INTERMEDIATE: Final = 128
MAX_LENGTH: Final = 1024
STD: Final = 0.25


def write_target(folder: Path, seed: int = 7) -> Path:
    """A Llama of two layers."""
    generator = np.random.default_rng(seed)
    weights: Weights = {
        "model.embed_tokens.weight": _normal(generator, VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": _normal(generator, VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        weights |= _layer(generator, f"model.layers.{layer}.")
    return _write(folder, weights, _config(LAYERS))


def write_draft(folder: Path, seed: int = 11) -> Path:
    """An EAGLE head of one layer for the target; it shares the target's embedding and output head."""
    generator = np.random.default_rng(seed)
    weights = {"fc.weight": _normal(generator, HIDDEN, 2 * HIDDEN)} | _layer(generator, "layers.0.")
    del weights["layers.0.input_layernorm.weight"]
    return _write(folder, weights, _config(1))


def _layer(generator: np.random.Generator, prefix: str) -> Weights:
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    weights = {prefix + name: _normal(generator, *shape) for name, shape in shapes.items()}
    weights[prefix + "input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    weights[prefix + "post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _normal(generator: np.random.Generator, *shape: int, std: float = STD) -> NDArray[np.float32]:
    return (generator.standard_normal(shape) * std).astype(np.float32)


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _write(folder: Path, weights: Weights, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    offset = 0
    for name, tensor in weights.items():
        table[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in weights.values():
            stream.write(tensor.tobytes())
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
