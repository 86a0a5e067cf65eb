"""A fake CUDA driver, compiled on demand, which notes every call and whose device memory is host memory; and what torch
says of memory on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FAKE = r"""
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
static char calls[1 << 16]; static int devices = 2, fail_after = -1, failure; static __thread void* current;
#define NOTE(...) { size_t used = strlen(calls); snprintf(calls + used, sizeof calls - used, __VA_ARGS__); \
                    if (fail_after >= 0 && fail_after-- == 0) return failure; }
typedef unsigned long long dptr;
const char* fake_calls(void) { return calls; }
void fake_reset(int count, int after, int code) { calls[0] = 0; devices = count; fail_after = after; failure = code; }
int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGetCount(int* n) { *n = devices; return 0; }
int cuDeviceGet(int* handle, int i) { *handle = 40 + i; return 0; }
int cuGetErrorName(int e, const char** s) { *s = e == 712 ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" : 0; return 0; }
int cuGetErrorString(int e, const char** s) { *s = e == 712 ? "part or all of it is mapped" : 0; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int handle) {
  NOTE("retain %d\n", handle); *c = (char*)0 + 1000 + handle; return 0; }
int cuCtxGetCurrent(void** c) { *c = current; return 0; }
int cuCtxSetCurrent(void* c) { NOTE("current %d\n", (int)((char*)c - (char*)0)); current = c; return 0; }
int cuMemHostRegister_v2(void* p, size_t n, unsigned flags) { NOTE("register %p %zu %u\n", p, n, flags); return 0; }
int cuMemHostUnregister(void* p) { NOTE("unregister %p\n", p); return 0; }
/* A stream works at once, or, while it is captured, when the tape is replayed. */
static struct { void* to; const void* from; size_t n; void (*fn)(void*); void* data; unsigned value; } tape[1024];
static int taped, capturing, words = 1;
static void* host(void* i) { tape[(size_t)i].fn(tape[(size_t)i].data); return 0; }
static void put(void* i) { __atomic_store_n((unsigned*)tape[(size_t)i].to, tape[(size_t)i].value, __ATOMIC_RELEASE); }
static void until(void* i) {
  while (__atomic_load_n((unsigned*)tape[(size_t)i].to, __ATOMIC_ACQUIRE) != tape[(size_t)i].value) sched_yield(); }
static void play(size_t i) {
  pthread_t thread;
  if (!tape[i].fn) memcpy(tape[i].to, tape[i].from, tape[i].n);
  else if (tape[i].fn == put || tape[i].fn == until) tape[i].fn((void*)i);
  else if (!pthread_create(&thread, 0, host, (void*)i)) pthread_join(thread, 0);
}
static int enqueue(void* to, const void* from, size_t n, void (*fn)(void*), void* data, unsigned value) {
  if (taped == 1024) return 2;
  tape[taped].to = to; tape[taped].from = from; tape[taped].n = n; tape[taped].fn = fn; tape[taped].data = data;
  tape[taped].value = value;
  if (capturing) taped++; else play(taped);
  return 0;
}
void fake_words(int on) { words = on; }
int cuDeviceGetAttribute(int* value, int which, int handle) { *value = which == 122 && words; return 0; }
void fake_capture(int on) { capturing = on; if (on) taped = 0; }
void fake_replay(void) { for (int i = 0; i < taped; i++) play(i); }
int cuMemcpyHtoDAsync_v2(dptr to, const void* from, size_t n, void* s) {
  NOTE("in %zu stream %d\n", n, (int)((char*)s - (char*)0)); return enqueue((void*)to, from, n, 0, 0, 0); }
int cuMemcpyDtoHAsync_v2(void* to, dptr from, size_t n, void* s) {
  NOTE("out %zu stream %d\n", n, (int)((char*)s - (char*)0)); return enqueue(to, (void*)from, n, 0, 0, 0); }
int cuLaunchHostFunc(void* s, void (*fn)(void*), void* data) {
  NOTE("host stream %d\n", (int)((char*)s - (char*)0)); return enqueue(0, 0, 0, fn, data, 0); }
int cuMemHostGetDevicePointer_v2(dptr* d, void* p, unsigned flags) {
  NOTE("address %p\n", p); *d = (dptr)p; return flags; }
int cuStreamWriteValue32_v2(void* s, dptr word, unsigned value, unsigned flags) {
  NOTE("word %u stream %d\n", value, (int)((char*)s - (char*)0)); return enqueue((void*)word, 0, 0, put, 0, value); }
int cuStreamWaitValue32_v2(void* s, dptr word, unsigned value, unsigned flags) {
  NOTE("until %u stream %d\n", value, (int)((char*)s - (char*)0)); return enqueue((void*)word, 0, 0, until, 0, value); }
"""


class Fake:
    """The compiled library: its path, its calls, and which call is to fail."""

    def __init__(self, path: Path) -> None:
        self.path, self.driver = str(path), ctypes.CDLL(str(path))
        self.driver.fake_calls.restype = ctypes.c_char_p
        self.reset()

    def reset(self, devices: int = 2, fail_after: int = -1, failure: int = 0, words: bool = True) -> None:
        self.driver.fake_reset(devices, fail_after, failure)
        self.driver.fake_words(int(words))

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Work enqueued during the block runs in `replay` only."""
        self.driver.fake_capture(1)
        yield
        self.driver.fake_capture(0)

    def replay(self) -> None:
        """Run what was captured last, at the same addresses."""
        self.driver.fake_replay()

    @property
    def calls(self) -> list[str]:
        return self.driver.fake_calls().decode().splitlines()


def build(folder: Path) -> Fake:
    """Compile the library in a folder. Skips the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "fake.c").write_text(FAKE)
    command = [compiler, "-shared", "-fPIC", "-w", "-pthread", "-o", str(folder / "libfake.so"), str(folder / "fake.c")]
    subprocess.run(command, check=True)
    return Fake(folder / "libfake.so")


def statistics(reserved: int, allocated: int = 0, peak: int = 0) -> dict[str, dict[str, dict[str, int]]]:
    """What torch's allocator says of its memory in bytes, as `torch.cuda.memory_stats_as_nested_dict` does."""
    return {
        "reserved_bytes": {"all": {"current": reserved}},
        "allocated_bytes": {"all": {"current": allocated, "peak": peak}},
    }
