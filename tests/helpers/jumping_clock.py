"""A process whose wall clock jumps and whose monotonic clock does not: libc's clocks answer through a small library."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int file = open(getenv("JUMPING_CLOCK"), O_RDONLY);
    offset = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t clock, struct timespec *answer) {
    int code = real(clock, answer);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) answer->tv_sec += *offset;
    return code;
}
time_t time(time_t *answer) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (answer) *answer = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *answer, void *zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    answer->tv_sec = now.tv_sec;
    answer->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
HAS_COMPILER = shutil.which("cc") is not None


class JumpingClock:
    """Processes that are started with `environment` see the date that `jump` says."""

    def __init__(self, directory: Path) -> None:
        self._offset, library = directory / "offset", directory / "jumping_clock.so"
        self.jump(0)
        (directory / "jumping_clock.c").write_text(SOURCE)
        command = ["cc", "-shared", "-fPIC", "-o", str(library), str(directory / "jumping_clock.c"), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """The date is now `seconds` away from the true one."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))
