"""The builds for torch, and the CUDA devices, each asked in another process.

Run as a module, this file asks the CUDA driver, which then may hang or crash there.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from typing import Any

from unisono import __main__ as installed
from unisono import _native
from unisono._doctor.finding import ADVICE, OK, Finding, run_module

SECONDS = 60


def try_out() -> list[Finding]:
    """Return the findings about torch and CUDA."""
    return [_torch(), *_cuda()]


def _torch() -> Finding:
    # As `python -m unisono` has it: "2.15.0, not served: `...` makes a build for it".
    line = installed._torch_here()
    if ", not served: " in line:
        line = line.partition(": `" if ": `" in line else "; try `")[0]
        return Finding("torch", ADVICE, line, _native.BUILD)
    return Finding("torch", OK, line)


def _cuda() -> list[Finding]:
    line = installed._cuda()
    if line.startswith("no "):
        return [Finding("cuda", OK, line)]
    asked = run_module("unisono._doctor.machine", [])
    with asked:
        try:
            out, err = asked.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            asked.kill()
            asked.communicate()
            return [Finding("cuda", ADVICE, f"{line}; it does not answer", "nvidia-smi")]
    if asked.returncode:
        words = (err.strip().splitlines() or [f"it ended with {asked.returncode}"])[-1]
        return [Finding("cuda", ADVICE, f"{line}; it cannot be asked: {words}", "nvidia-smi")]
    return judge(line, json.loads(out))


def judge(line: str, told: dict[str, Any]) -> list[Finding]:
    """Return the findings in the answer of the driver."""
    if told["error"]:
        words = f"{line}; it serves no device: {told['error']}"
        return [Finding("cuda", ADVICE, words, "nvidia-smi\necho $CUDA_VISIBLE_DEVICES")]
    names: list[str] = told["names"]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    found = [Finding("cuda", OK, f"{line}: {kinds or 'no device'}")]
    if len(names) < 2:
        return found
    # In one direction, or in both.
    pairs = sorted({(min(both), max(both)) for both in told["refused"]})
    refused = [f"{one}-{other}" for one, other in pairs]
    if not refused:
        return [*found, Finding("peers", OK, "every device reaches the memory of every other one")]
    shown = ", ".join(refused[:8]) + (" ..." if len(refused) > 8 else "")
    line = f"devices that do not reach each other's memory, which goes through the host's: {shown}"
    return [*found, Finding("peers", ADVICE, line, "nvidia-smi topo -p2p r")]


def ask() -> dict[str, Any]:
    """Ask the driver for its devices and the pairs without access to each other's memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuInit(0)
    if code:
        return {"error": f"cuInit returns {code}", "names": [], "refused": []}
    number = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(number))
    names, refused = [], []
    for one in range(number.value):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, len(name), one)
        names.append(name.value.decode(errors="replace"))
        for other in range(number.value):
            can = ctypes.c_int(1)
            if one != other:
                driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other)
            if not can.value:
                refused.append((one, other))
    return {"error": "", "names": names, "refused": refused}


if __name__ == "__main__":
    print(json.dumps(ask()))
