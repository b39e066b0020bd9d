"""One vLLM engine as a process that a test drives by JSON lines; runs in the engine's own virtual environment.

vLLM runs inside this process (no engine-core process), so that a test can see and spoil what no API shows: block bytes,
the block pool, the moment between lookup and load. A call is a line {"call": name, ...}, its answer {"answer": ...};
while a gate is shut, {"event": "load"} says that a load is about to begin and any line lets it go on.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from engine.rig import spoil

Answer = dict[str, Any]


class Driver:
    """The engine and the calls that a test makes."""

    def __init__(self, options: dict[str, Any], channel: "Channel") -> None:
        self.llm = LLM(**options)
        core = self.llm.llm_engine.engine_core.engine_core
        self.core = core
        self.scheduler: Scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.connector = self.scheduler.connector
        self.probe = spoil.Probe(self, channel) if self.connector is not None else None
        self._next = 0

    # ---------------------------------------------------------------------------------------------- memory

    @property
    def caches(self) -> list[torch.Tensor]:
        """Every layer's KV, blocks first, in the group's order."""
        layers = self.scheduler.kv_cache_config.kv_cache_groups[0].layer_names
        context = self.runner.compilation_config.static_forward_context
        return [context[name].kv_cache for name in layers]

    # ----------------------------------------------------------------------------------------------- calls

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, wave: int = 16, **faults: Any
    ) -> Answer:
        """Run prompts, at most `wave` at once; tokens and logprobs of each, in order."""
        began = time.monotonic()
        answers: dict[str, Answer] = {}
        names: list[str] = []
        for first in range(0, len(prompts), wave):
            batch = [self._add(prompt, max_tokens) for prompt in prompts[first : first + wave]]
            names += batch
            answers.update(self._run(set(batch), faults))
            if faults.get("settle") or faults.get("forget"):
                self.settle()
            if faults.get("forget"):
                # So that the pool is asked for every wave's prompts, not only for the first ones of a prefix.
                self.forget()
        return {
            "outputs": [answers[name] for name in names],
            "seconds": time.monotonic() - began,
            **self._counts(),
        }

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        self._next += 1
        name = f"r{self._next}"
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=2, detokenize=False, ignore_eos=True
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        return name

    def _run(self, names: set[str], faults: dict[str, Any]) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        aborted = self._abort(names, faults.get("abort", 0)) if self.probe is None else set()
        deadline = time.monotonic() + float(faults.get("deadline", 120))
        preempt = int(faults.get("preempt", 0))
        while names - found.keys() - aborted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished: {sorted(names - found.keys())}")
            for output in self.llm.llm_engine.step():
                if output.finished:
                    found[_plain(output.request_id)] = answer_of(output)
            if self.probe is not None:
                aborted |= self._abort_loading(names - aborted, int(faults.get("abort", 0)) - len(aborted))
                if preempt and len(self.scheduler.running) > 1:
                    preempt -= self._preempt_one()
            time.sleep(0.0005)  # noqa: TID251 - the engine core's own loop pauses here, too, and lets other threads run
        return found | {name: {"aborted": True} for name in aborted}

    def _abort(self, names: set[str], count: int) -> set[str]:
        chosen = set(sorted(names)[:count])
        self.llm.llm_engine.abort_request(list(chosen))
        return chosen

    def _abort_loading(self, names: set[str], count: int) -> set[str]:
        """Abort requests that wait for a load."""
        waiting = [
            _plain(request.request_id)
            for request in self.scheduler.requests.values()
            if request.status.name == "WAITING_FOR_REMOTE_KVS"
        ]
        chosen = [name for name in waiting if name in names][: max(0, count)]
        if chosen:
            self.llm.llm_engine.abort_request(chosen)
        return set(chosen)

    def _preempt_one(self) -> int:
        """Take the youngest running request's blocks away, as a full pool would, and overwrite what is free of them."""
        request = self.scheduler.running.pop()
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        self.scheduler._preempt_request(request, time.monotonic())
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block for block in blocks if pool.blocks[block].ref_cnt == 0})
        if self.probe is not None:
            self.probe.poison_free()
            self.probe.outwait_saves()
        return 1

    def settle(self, seconds: float = 30.0) -> Answer:
        """Step the idle engine until nothing is under way; says how many blocks are still taken."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.engine_core.get_output()
            time.sleep(0.0005)  # noqa: TID251 - as above
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "busy": self.scheduler.has_requests(),
            "taken": pool.num_gpu_blocks - pool.get_num_free_blocks() - 1,
            **self._counts(),
        }

    def forget(self) -> Answer:
        """Drop vLLM's own prefix cache, so that only the pool can answer."""
        return {"done": self.scheduler.reset_prefix_cache()}

    def attached(self, seconds: float = 20.0) -> Answer:
        """Wait until both sides of the connector have a session."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            clients = self.probe.clients() if self.probe is not None else []
            if clients and all(client.attached for client in clients):
                return {"attached": True}
            time.sleep(0.02)  # noqa: TID251 - a condition of another thread, bounded
        return {"attached": False}

    def spoil(self, **switches: Any) -> Answer:
        """Set the probe's switches; see `spoil.Switches`."""
        if self.probe is None:
            raise RuntimeError("an engine without a connector has nothing to spoil")
        self.probe.switch(**switches)
        return {}

    def seen(self) -> Answer:
        """Digests of blocks at save and after load since the last call."""
        return {} if self.probe is None else self.probe.take()

    def _counts(self) -> Answer:
        return {} if self.probe is None else {"counts": self.probe.counts()}


class Channel:
    """Lines to and from the test."""

    def __init__(self) -> None:
        # vLLM prints on standard output; the test's lines get a descriptor of their own.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: Answer) -> None:
        """One line."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def wait(self) -> str:
        """The next line."""
        return sys.stdin.readline()

    def serve(self, engine: object) -> None:
        """Say that it is ready and take calls until the test closes its end."""
        self.send({"answer": "ready"})
        while line := self.wait():
            call = json.loads(line)
            try:
                self.send({"answer": getattr(engine, call.pop("call"))(**call)})
            except Exception as error:  # noqa: BLE001 - the test hears of it as the call's answer
                self.send({"error": f"{type(error).__name__}: {error}"})


def _plain(request_id: str) -> str:
    """The id that was given to `add_request`; vLLM may append to it."""
    return request_id.split("-", maxsplit=1)[0]


def answer_of(output: Any) -> Answer:
    """What a test compares."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in step.items()} for step in completion.logprobs
        ],
        "cached": output.num_cached_tokens,
    }


def main() -> None:
    """Serve calls until standard input ends."""
    channel = Channel()
    driver = Driver(json.loads(sys.argv[1]), channel)
    channel.serve(driver)


if __name__ == "__main__":
    main()
