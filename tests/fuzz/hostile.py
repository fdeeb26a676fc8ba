"""What the fuzz tests share: how many cases, mutations of bytes and of JSON, and the watch over one case.

`watch(folder)` fails a case that executes or imports what an input names, unpickles, starts a process, writes outside folder or takes
too much processor time. `command()` runs a command under it and holds it to the contract of the command line.
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

import k3lab.figures  # noqa: F401  (matplotlib makes its folder in the user's home on the first import)
from k3lab.__main__ import main
from k3lab.errors import K3labError

ROOT = Path(__file__).parents[2]
CAPTURES = ROOT / "data" / "captures"
LONG = os.environ.get("K3LAB_FUZZ") == "long"
TIMES = 25  # cases of the long run for one of the short run
CPU_SECONDS = 20  # of one case, on a busy machine too
CANARY = "k3lab_canary"  # planted in inputs: no source, module or function of that name may ever be reached

_STARTS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1, "os.chmod": 1}
_watched: dict = {}


class Escaped(BaseException):
    """Something happened that no input may cause; no `except Exception` hides it."""


def cases(n: int) -> settings:
    """n cases, or TIMES as many in the long run. The short run is the same every time."""
    return settings(
        max_examples=n * TIMES if LONG else n, derandomize=not LONG, deadline=None, database=None, print_blob=LONG,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],  # a case is a few edits: shrinking it takes minutes
    )  # fmt: skip


def _audit(event: str, args: tuple) -> None:
    if not _watched:
        return
    if event == "open":
        path, mode, flags = args
        if isinstance(path, str | bytes) and (flags or 0) & _WRITES and not (mode and set(mode) <= set("rbt")):
            _inside(event, path)
    elif event in _PATHS:
        dir_fds = [x for x in args[_PATHS[event] :] if isinstance(x, int) and x >= 0]
        for path in args[: _PATHS[event]] if not dir_fds or event == "os.mkdir" else ():
            if event != "os.symlink" or path != args[0]:
                _inside(event, path)
    elif event in _STARTS and not (event == "subprocess.Popen" and args[0] == "git"):  # a figure's footer names the commit
        _fail(f"{event} {args!r:.200}")
    elif event in ("exec", "compile", "import"):
        text = args[0]
        text = f"{text.co_filename} {text.co_names} {text.co_consts}" if hasattr(text, "co_names") else text
        if isinstance(text, bytes):
            text = text.decode("latin1")
        if isinstance(text, str) and CANARY in text:
            _fail(f"{event} of what an input says: {text:.200}")


def _inside(event: str, path: object) -> None:
    name = os.path.realpath(os.fsdecode(path))
    allowed = name == os.devnull or "__pycache__" in name or name.startswith(_watched["folder"] + os.sep) or name == _watched["folder"]
    if not allowed:
        _fail(f"{event} {name}, outside {_watched['folder']}")


def _fail(why: str) -> None:
    _watched["seen"].append(why)
    raise Escaped(why)


sys.addaudithook(_audit)


@contextlib.contextmanager
def watch(folder: Path, seconds: float = CPU_SECONDS) -> Iterator[None]:
    """Run the block with folder as the one place to write, and with a limit on processor time."""

    def late(*_: object) -> None:
        raise Escaped(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    seen = []
    _watched.update(folder=os.path.realpath(folder), seen=seen)
    try:
        yield
    finally:
        _watched.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert not seen, seen


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Let the package's errors pass, in one clear line; everything else fails the case."""
    try:
        yield
    except K3labError as error:
        text = str(error)
        assert text.strip(), "an error without a word"
        assert len(text) < 20_000, f"an error of {len(text)} characters: {text[:300]}"


def command(folder: Path, args: list, out: bool = False) -> tuple[int, str, str]:
    """Run a command as the shell would; check exit status, stderr, JSON, and that --out (folder/out) has all of its files or none."""
    args = [str(a) for a in args]
    target = folder / "out"
    if out:
        args += ["--out", str(target)]
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    with watch(folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = main(args)
    stdout.flush(), stderr.flush()
    said, told = (s.buffer.getvalue().decode("utf-8") for s in (stdout, stderr))
    assert status in (0, 1, 2), status
    assert "Traceback" not in told, told
    complaints = [x for x in told.splitlines() if x]
    assert all(x.startswith("k3lab: ") for x in complaints), told
    assert all(c.isprintable() or c == "\n" for c in said + told), "control characters of an input reach the terminal"
    if status < 2:
        assert not complaints, told
    if not said:
        assert status == 2, "nothing said and nothing wrong"
        assert len(complaints) == 1, told
    elif "--json" in args:
        json.loads(said, parse_constant=lambda x: (_ for _ in ()).throw(AssertionError(f"{x} is not JSON")))
    if out:
        names = sorted(p.name for p in target.iterdir()) if target.is_dir() else []
        report = [f"k3lab-{args[0]}.json", f"k3lab-{args[0]}.txt"]
        figure = [f"{args[0]}{kind}" for kind in (".csv", ".md", ".png", ".svg")]
        assert names in ([], sorted(report), sorted(report + figure)), names
        # check reports on files that it could not read; else nothing said is nothing written
        assert bool(names) == bool(said) or (args[0] == "check" and not said), (names, said[:200])
    return status, said, told


# ---------------------------------------------------------------- mutations

# what breaks readers: not numbers, numbers out of range, digits that are none or not ASCII, other ends of lines, escapes, code
TOKENS = [
    b"nan", b"NaN", b"inf", b"-inf", b"Infinity", b"null", b"true", b"-1", b"-0", b"0", b"1e309", b"1e-400", b"9" * 25, b"9" * 5000,
    b"0x7fffffff", b"1_0", "\u0663".encode(), "\u00b2".encode(), b"", b" ", b"\n", b"\r", b"\r\n", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf",
    b"\x1b[31m", "\u2028".encode(), "\u202e".encode(), b"\\ud800", b"{", b"}", b"[", b"]", b'"', b",", b":", b"|", b"%", b"../../../x",
    b"/etc/passwd", b"[" * 3000, b'{"a":' * 3000, f"__import__('{CANARY}')".encode(), f"!!python/object/apply:{CANARY}.f".encode(),
    b"cos\nsystem\n(S'true'\ntR.", b"$(touch x)", b"a" * 5000,
]  # fmt: skip
NUMBER = re.compile(rb"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@st.composite
def garbled(draw: st.DrawFn, base: bytes, most: int = 4) -> bytes:
    """base after one to `most` edits: bits flipped, slices cut, doubled or moved, numbers and pieces replaced, the end cut off."""
    data = bytearray(base)
    for _ in range(draw(st.integers(1, most))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        size = draw(st.integers(1, max(1, min(len(data) - at, 300))))
        token = draw(st.sampled_from(TOKENS))
        how = draw(st.sampled_from(["number", "number", "token", "flip", "cut", "end", "double", "move", "over", "line"]))
        if how == "number":
            found = NUMBER.search(bytes(data[at : at + 4000]))
            if found:
                data[at + found.start() : at + found.end()] = token
        elif how == "token":
            data[at:at] = token
        elif how == "over":
            data[at : at + size] = token
        elif how == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at : at + size]
        elif how == "end":
            del data[at:]
        elif how == "double":
            data[at:at] = data[at : at + size]
        elif how == "move":
            piece = data[at : at + size]
            del data[at : at + size]
            to = draw(st.integers(0, len(data)))
            data[to:to] = piece
        else:
            lines = bytes(data).split(b"\n")
            i, j = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            lines[i], lines[j] = lines[j], lines[i]
            data = bytearray(b"\n".join(lines))
    return bytes(data)


WORDS = st.sampled_from(
    ["", "x", "..", "../../x", "/etc/passwd", "a\x00b", "\ud800", "\x1b[2J", "é" * 300, CANARY, f"{CANARY}:main", f"import {CANARY}",
     "{'__reduce__': 1}", "kda", "vk", "nan", "1e999", "\n", "|", "None", "prefix", "hip:gfx950", "*bf16", "i32"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, -1]), WORDS,
    st.floats(), st.sampled_from([1e308, 5e-324, -0.0, 0.5]), st.text(max_size=8),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, st.text(max_size=5)), inner, max_size=4),
        st.builds(lambda: {"__reduce__": ["os.system", "true"], "py/object": f"{CANARY}.C"}), st.builds(lambda: [[[], []], [[]]]),
    ),
    max_leaves=8,
)  # fmt: skip


def _places(node: object, path: tuple = ()) -> Iterator[tuple]:
    yield path
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _places(value, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, document: object, most: int = 3) -> object:
    """A JSON document with one to `most` of its values replaced, removed, doubled, wrapped or given to another key."""
    root = [json.loads(json.dumps(document, sort_keys=True))]  # safetensors writes a header in any order
    for _ in range(draw(st.integers(1, most))):
        places = [p for p in _places(root) if p]
        *way, last = draw(st.sampled_from(places))
        node = root
        for key in way:
            node = node[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "wrap", "double", "other"]))
        if how == "remove" and len(places) > 1 and node is not root:
            del node[last]
        elif how == "wrap":
            node[last] = draw(st.sampled_from([[node[last]], {"a": node[last]}, {"results": node[last]}]))
        elif how == "double" and isinstance(node, list) and node is not root:
            node.insert(last, node[last])
        elif how == "other":
            *source, key = draw(st.sampled_from(places))
            value = root
            for k in source:
                value = value[k]
            node[last] = json.loads(json.dumps(value[key]))
        else:
            node[last] = draw(VALUES)
    return root[0]


def dumped(document: object) -> str:
    """JSON text of a document, NaN and Infinity as Python writes them."""
    return json.dumps(document)


def json_files(document: object) -> st.SearchStrategy[bytes]:
    """Bytes of a JSON file: a document with values changed, or its text garbled, or anything at all."""
    text = json.dumps(document, indent=1).encode()
    changed = mutated(document).map(lambda d: json.dumps(d).encode())
    odd = st.sampled_from(
        [b"[" * 90_000, b'{"a":' * 90_000, b"9" * 5000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1, "a": 2}', b"\xff\xfe{}", b"null"]
    )
    return st.one_of(changed, changed, changed, garbled(text), odd, VALUES.map(lambda d: json.dumps(d).encode()), st.binary(max_size=40))
