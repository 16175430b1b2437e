"""FASER's worker is vLLM's own one wherever FASER has no business. One vLLM import in a process of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

CODE = """
import os
from faser.engine_adapter import worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

assert worker.FaserWorker is not CPUWorker and issubclass(worker.FaserWorker, CPUWorker)

os.environ["FASER_ENABLED"] = "0"
assert worker.worker_class() is CPUWorker
os.environ["FASER_ENABLED"] = "maybe"
assert worker.worker_class() is CPUWorker
del os.environ["FASER_ENABLED"]
os.environ["FASER_ENDPOINT"] = "tcp://127.0.0.1:abc"
assert worker.worker_class() is CPUWorker
del os.environ["FASER_ENDPOINT"]

known, worker.vllm_version = worker.vllm_version, lambda: "0.99.0"
assert worker.worker_class() is CPUWorker
def unreadable():
    raise RuntimeError("no metadata")
worker.vllm_version = unreadable
assert worker.worker_class() is CPUWorker
worker.vllm_version = known

# A mixin that cannot be built leaves vLLM's runner; afterwards vLLM's module is as it was.
import vllm.v1.worker.gpu_model_runner as module
def broken(_):
    raise RuntimeError("broken on purpose")
with worker._substituted("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", broken):
    assert module.GPUModelRunner is GPUModelRunner
with worker._substituted("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", worker._with_v1):
    assert module.GPUModelRunner.__name__ == "FaserGPUModelRunner"
assert module.GPUModelRunner is GPUModelRunner

# The GPU worker gets whichever runner vLLM chooses, with FASER in front.
import vllm.v1.worker.gpu.model_runner as module_v2
for is_v2, home in ((False, module), (True, module_v2)):
    class Fake(worker.GpuWorker):
        use_v2_model_runner = is_v2
    name = Fake().make_runner(lambda: home.GPUModelRunner.__mro__[1].__name__)
    assert name == ("FaserRunnerV2" if is_v2 else "FaserRunnerV1"), name
print("as it should be")
"""


def test_the_worker_is_vllms_own_where_faser_is_off() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "as it should be" in done.stdout
    assert "FASER_ENABLED='maybe'" in done.stderr
    assert "FASER_ENDPOINT='tcp://127.0.0.1:abc'" in done.stderr
    assert "FASER is off in this worker: RuntimeError: no metadata" in done.stderr
    assert "vLLM 0.99.0 is not known to FASER" in done.stderr
