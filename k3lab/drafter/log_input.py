"""Logs as streams of whole lines: files, .gz, standard input or pasted text, in bounded memory; what is no text is refused."""

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from k3lab.errors import BadInput

CHUNK = 4 << 20
LONGEST = 32 << 20  # a line or a JSON document above it is not read to its end
HEAD = 200


def opened(inputs: str | Path | Iterable[str | Path]) -> Iterator[tuple]:
    """(name, context manager of a stream) of each input. Raises BadInput for what is no readable text."""
    if isinstance(inputs, str) and _is_text(inputs):
        if not inputs.strip():
            raise BadInput("pasted text: it is empty; paste the lines of a log")
        data = inputs.encode("utf-8", "surrogateescape")
        yield "pasted text", lambda: _checked("pasted text", BytesIO(data))
        return
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not paths:
        raise BadInput("no log given; name at least one file")
    for path in paths:
        if [str(p) for p in paths].count(str(path)) > 1:
            raise BadInput(f"{path}: given more than once; its counts would be added twice")
    for path in paths:
        yield ("standard input" if str(path) == "-" else str(path)), lambda path=path: _file(path)


def _is_text(text: str) -> bool:
    if "\n" in text or not text:
        return True
    try:
        return (": " in text or "{" in text) and not Path(text).exists()
    except (OSError, ValueError):  # too long or not allowed as a name
        return True


@contextmanager
def _file(path: str | Path) -> Iterator:
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            with _checked(name, sys.stdin.buffer) as f:
                yield f
            return
        if Path(path).is_dir():
            raise BadInput(f"{path}: a folder; name the log files in it")
        with open(path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"  # no seek: `<(zcat server.log.gz)` is a pipe
            with _checked(name, gzip.open(raw) if packed else raw) as f:
                yield f
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path}: the .gz is damaged or cut off ({error}); unpack what is there with gzip -dc and read that") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise BadInput(f"{str(path)[:HEAD]!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


class Rewound:
    """A stream whose first bytes were looked at already."""

    def __init__(self, head: bytes, f) -> None:
        self.head, self.f = head, f

    def read(self, size: int) -> bytes:
        if self.head:
            out, self.head = self.head[:size], self.head[size:]
            return out
        return self.f.read(size)


@contextmanager
def _checked(name: str, f) -> Iterator[Rewound]:
    head = f.read(1 << 16)
    if not head.strip() and not f.read(1):
        raise BadInput(f"{name}: the file is empty")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadInput(f"{name}: UTF-16 text; convert it first: iconv -f UTF-16 -t UTF-8")
    if b"\0" in head[:4096]:
        raise BadInput(f"{name}: binary, not a log")
    yield Rewound(head, f)


def chunks(f) -> Iterator[tuple[bytes, bool]]:
    """Whole lines, some MiB at a time, and whether the last one was cut: a line above LONGEST is given up to HEAD bytes."""
    rest, skipping = b"", False
    while block := f.read(CHUNK):
        if skipping:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, skipping = block[end + 1 :], False
        end = block.rfind(b"\n")
        if end >= 0:
            yield rest + block[:end], False
            rest = block[end + 1 :]
        else:
            rest += block
        if len(rest) > LONGEST:
            yield rest[:HEAD], True
            rest, skipping = b"", True
    if rest:
        yield rest, False
