"""ktft's calls of CUDA's driver, made to a fake library that notes them; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fake_cuda import Fake

from ktft import config
from ktft.native import cuda
from ktft.native.cuda import CudaError, Driver, Rows


def in_thread(work: object) -> None:
    """Run in a new thread, which has no context yet."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def copies(fake: Fake) -> list[str]:
    return [call for call in fake.calls if "stream" in call]


def test_registration_makes_the_primary_context_current_and_restores_the_threads_own(fake: Fake) -> None:
    driver = Driver(fake.path)
    assert driver.devices == 2
    fake.reset()

    def work() -> None:
        driver.register(0, 4096, 1 << 20)
        driver.register(0, 8 << 20, 512)
        driver.unregister(0, 4096)
        driver.register(1, 16 << 20, 512)
        driver.unregister(0, 8 << 20)

    in_thread(work)
    assert fake.calls == [
        "retain 40",
        "current 1040",
        "register 0x1000 1048576 1",
        "register 0x800000 512 1",
        "unregister 0x1000",
        "retain 41",
        "current 1041",
        "register 0x1000000 512 1",
        "current 1040",  # the thread's context, which was the first device's
        "unregister 0x800000",
    ]


def test_batches_copy_the_rows_and_merge_neighbours(fake: Fake) -> None:
    driver, rows = Driver(fake.path), [2, 3, 4, 7, 0, 1]
    weights, adapter = torch.randint(0, 99, (9, 64), dtype=torch.uint8), torch.randn(9, 5, 3)
    on_device = torch.zeros(6, 64, dtype=torch.uint8), torch.zeros(6, 5, 3)
    sizes = zip((weights, adapter), on_device, (64, 60), strict=True)
    matrices = [Rows(matrix.data_ptr(), batch.data_ptr(), size) for matrix, batch, size in sizes]
    fake.reset()
    assert driver.copy_to_device(0, rows, matrices, 77) == 6
    assert copies(fake) == [f"in {n * size} stream 77" for size in (64, 60) for n in (3, 1, 2)]
    assert torch.equal(on_device[0], weights[rows]) and torch.equal(on_device[1], adapter[rows])

    back = torch.zeros_like(adapter)
    fake.reset()
    assert driver.copy_to_host(0, rows, [Rows(back.data_ptr(), on_device[1].data_ptr(), 60)], 5) == 3
    assert torch.equal(back[rows], adapter[rows]) and not back[[5, 6, 8]].any()
    assert copies(fake) == [f"out {n * 60} stream 5" for n in (3, 1, 2)]

    fake.reset()
    wide = torch.zeros(6, 100, dtype=torch.uint8)  # blocks with something between them cannot merge
    assert driver.copy_to_device(0, rows, [Rows(weights.data_ptr(), wide.data_ptr(), 50, 64, 100)], 0) == 6
    assert torch.equal(wide[:, :50], weights[rows, :50]) and not wide[:, 50:].any()


def test_errors_name_the_call_the_sizes_and_what_the_driver_says(fake: Fake) -> None:
    driver = Driver(fake.path)
    driver.register(0, 4096, 1)  # the context is there
    fake.reset(fail_after=0, failure=712)
    message = "cuMemHostRegister of 12345 bytes at 0x1000 failed: CUDA_ERROR_HOST_MEMORY_ALR"
    with pytest.raises(CudaError, match=message):
        driver.register(0, 4096, 12345)
    source, target = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8)
    fake.reset(fail_after=1, failure=999)
    message = r"cuMemcpyHtoDAsync of 8 bytes from 0x\w+ to 0x\w+ \(copy 2 of 2\) failed: error 999"
    with pytest.raises(CudaError, match=message):
        driver.copy_to_device(0, [0, 2], [Rows(source.data_ptr(), target.data_ptr(), 8)], 0)
    fake.reset()
    with pytest.raises(CudaError, match="there is no CUDA device 2, the driver has 2"):
        driver.register(2, 4096, 1)


def test_without_a_driver_the_reason_is_text(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KTFT_LIBCUDA", str(tmp_path / "libnone.so"))
    with pytest.raises(CudaError, match="CUDA's driver cannot be opened.*libnone.so: cannot open shared object file"):
        cuda.driver(config.cuda_library())
    monkeypatch.setenv("KTFT_LIBCUDA", fake.path)
    cuda.driver(config.cuda_library())
    fake.reset(devices=0)
    with pytest.raises(CudaError, match="CUDA's driver finds no device"):
        Driver(fake.path)
    monkeypatch.delenv("KTFT_LIBCUDA")
    assert config.cuda_library() == "libcuda.so.1"


def test_a_library_that_is_not_cudas_is_named() -> None:
    with pytest.raises(CudaError, match=r"libm.so.6 has no function cuInit: the driver is too old, or this is not"):
        Driver("libm.so.6")


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_on_the_host(threads: int) -> None:
    rows, source = [3, 4, 9, 0], torch.randn(10, 1 << 20)
    batch, back = torch.zeros(4, 1 << 20), torch.zeros_like(source)
    cuda.copy_on_host(rows, [Rows(source.data_ptr(), batch.data_ptr(), 4 << 20)], gather=True, threads=threads)
    assert torch.equal(batch, source[rows])
    cuda.copy_on_host(rows, [Rows(back.data_ptr(), batch.data_ptr(), 4 << 20)], gather=False, threads=threads)
    assert torch.equal(back[rows], source[rows]) and not back[[1, 2, 5, 6, 7, 8]].any()


def test_importing_ktft_opens_no_driver() -> None:
    code = "import ktft.native.cuda; print('libcuda' in open('/proc/self/maps').read())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"]
