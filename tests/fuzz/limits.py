"""Run commands on hostile files under limits: python limits.py FOLDER; a JSON line of arguments in, a JSON line of findings out.

A process of its own for each case, forked after the imports: address space and processor time are limited, and what is measured is
the largest resident size beyond that of a process that does nothing.
"""

import json
import os
import resource
import sys

import safetensors.torch  # noqa: F401

import k3lab.capture.check
import k3lab.drafter.evaldelta
import k3lab.drafter.logs
import k3lab.drafter.passport
import k3lab.races.lds
import k3lab.races.lint  # noqa: F401
from k3lab.__main__ import main

SPACE, SECONDS = 2 << 30, 60


def size() -> int:
    """Bytes of address space in use."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def run(args: list[str], folder: str) -> dict:
    """Exit status of main(args), stderr, resident bytes and processor seconds."""
    err = os.path.join(folder, "stderr")
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            resource.setrlimit(resource.RLIMIT_AS, (size() + SPACE,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            status = main(args) if args else 0
        except SystemExit as e:
            status = e.code
        except BaseException as e:
            print(f"{type(e).__name__}: {e}"[:500], file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else 98)
    _, code, used = os.wait4(pid, 0)
    with open(err, errors="replace") as f:
        text = f.read(4000)
    return {
        "status": os.waitstatus_to_exitcode(code),
        "stderr": text,
        "rss": used.ru_maxrss * 1024,
        "seconds": used.ru_utime + used.ru_stime,
    }


if __name__ == "__main__":
    base = run([], sys.argv[1])["rss"]
    for line in sys.stdin:
        found = run(json.loads(line), sys.argv[1])
        print(json.dumps({**found, "more": found["rss"] - base}), flush=True)
