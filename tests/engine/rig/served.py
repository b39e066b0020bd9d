"""One vLLM engine as users run it: a process for the engine core and one for every rank. Driven by JSON lines.

Nothing inside it can be touched here; `driver` is for that. Calls and answers as there.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from engine.rig.driver import Channel, answer_of


class Served:
    """The engine and the calls that a test makes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = LLM(**options)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Run prompts; tokens and logprobs of each, in order."""
        began = time.monotonic()
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=2, detokenize=False, ignore_eos=True
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return {
            "outputs": [answer_of(output) for output in outputs],
            "seconds": time.monotonic() - began,
        }

    def forget(self, seconds: float = 30.0) -> dict[str, Any]:
        """Drop vLLM's own prefix cache, which it does once no save keeps a block any more."""
        deadline = time.monotonic() + seconds
        while not (done := self.llm.reset_prefix_cache()) and time.monotonic() < deadline:
            time.sleep(0.05)  # noqa: TID251 - a condition of another process, bounded
        return {"done": done}


def main() -> None:
    """Serve calls until standard input ends."""
    channel = Channel()
    served = Served(json.loads(sys.argv[1]))
    channel.serve(served)


if __name__ == "__main__":
    main()
