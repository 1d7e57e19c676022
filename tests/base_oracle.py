#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""base_oracle BASE_CAT [SEED]: holds JSON, repr, YAML and digests of libcommon against Python's own; prints TAP.

Without PyYAML the YAML tests are skipped.
"""

import hashlib
import json
import math
import random
import struct
import subprocess
import sys

try:
    import yaml
except ImportError:
    yaml = None

CAT = sys.argv[1]
RNG = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
COUNT = FAILED = 0


def cat(data, *args):
    done = subprocess.run([CAT, *args], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode < 0:
        sys.exit(f"{CAT} died of signal {-done.returncode}")
    return done.stdout, done.returncode, done.stderr.decode()


def report(good, name, *notes):
    global COUNT, FAILED
    COUNT += 1
    FAILED += not good
    print(f"{'' if good else 'not '}ok {COUNT} - {name}")
    if not good:
        for note in notes:
            print(f"# {note}")


def same(name, got, want, names):
    """Lists of answers; the first differences are shown with what they answer to."""
    wrong = [(n, g, w) for n, g, w in zip(names, got, want) if g != w]
    report(not wrong and len(got) == len(want), f"{name} ({len(want)} values)",
           *[f"{n!r}: got {g!r}, want {w!r}" for n, g, w in wrong[:10]], f"{len(got)} answers for {len(want)}")


FLOATS = [0.0, -0.0, 1.0, 0.1, 1e-4, 1e-5, 1e-06, 9.999e-5, 1e15, 1e16, 123456789012345680.0, 9999999999999998.0, 1e22, 1e23,
          5e-324, 2.2250738585072014e-308, 2.225073858507201e-308, 1.7976931348623157e308, 1 / 3, 2.5, 1e6, 1e-7, 4.35,
          9007199254740993.0, 0.3, 2.0 ** -44, 1e21, 1.5e300]


def floats():
    yield from FLOATS
    for e in range(-1074, 1024):        # the gap below a power of two is half the gap above
        for d in (math.ldexp(1.0, e), math.nextafter(math.ldexp(1.0, e), 0)):
            yield d
    for _ in range(4000):
        d = struct.unpack("<d", RNG.randbytes(8))[0]
        if math.isfinite(d):
            yield d
        yield round(RNG.uniform(-1000, 1000), RNG.randrange(6))


STRINGS = ["", "plain", "it's", 'say "hi"', "both ' and \"", "back\\slash", "tab\tnl\ncr\r", "\x01\x1f\x7f\x08\x0c", "\u00e9\u00df", "\u4e2d\u6587",
           "\U0001f600 grin", "\u00a0nbsp", "\u00ad", "\u200b\u2028\u2029", "\ufeff", "\ue000", "\U000e0001", "\U0010ffff", "\uffff", "</script>",
           "\u0378", "\U0001fae0", "\u3000"]


def string():
    if RNG.random() < 0.3:
        return RNG.choice(STRINGS)
    kinds = [(0x20, 0x7f), (1, 0x20), (0x7f, 0x100), (0x100, 0x3000), (0x3000, 0xd800), (0xe000, 0x10000), (0x10000, 0x110000)]
    return "".join(chr(RNG.randrange(*RNG.choice(kinds[: RNG.randrange(1, 8)]))) for _ in range(RNG.randrange(12)))


def tree(depth=0):
    kind = RNG.randrange(6 if depth > 4 else 9)
    if kind == 0:
        return RNG.choice([None, True, False])
    if kind == 1:
        return RNG.randrange(-2 ** 63, 2 ** 63)
    if kind == 2:
        return RNG.randrange(-100, 100)
    if kind == 3:
        return RNG.choice(FLOATS)
    if kind < 6:
        return string()
    if kind == 6:
        return [tree(depth + 1) for _ in range(RNG.randrange(5))]
    return {string(): tree(depth + 1) for _ in range(RNG.randrange(5))}


def check_json():
    values = list(floats())
    got = cat("\n".join(map(repr, values)).encode() + b"\n", "reprs")[0].decode().split("\n")[:-1]
    same("repr of floats", got, [repr(v) for v in values], values)
    values = STRINGS + [string() for _ in range(3000)] + [[tree(2), string()] for _ in range(300)]
    text = "\n".join(json.dumps(v, ensure_ascii=False) for v in values)
    got = cat(text.encode() + b"\n", "reprs")[0].decode().split("\n")[:-1]
    # the table is Unicode 14's; an interpreter may know newer characters
    skip = sys.version_info[:2] not in ((3, 11),)
    if skip:
        got, values = zip(*[(g, v) for g, v in zip(got, values) if repr(v).isascii() or g == repr(v)])
    same("repr of strings and trees", got, [repr(v) for v in values], values)
    for mode, keys in (("json", False), ("json-sorted", True)):
        for indent in (None, 0, 2, 5):
            values = [tree() for _ in range(40)] + [[], {}, {"a": [], "b": {}}, [[]], [{}]] + STRINGS[:3]
            value = {"values": values, "z": 1, "a": 2}
            got = cat(json.dumps(value).encode(), mode, str(-1 if indent is None else indent))[0].decode()
            want = json.dumps(value, indent=indent, sort_keys=keys)
            report(got == want, f"json.dumps(indent={indent}, sort_keys={keys})", got[:300], want[:300])
    value = [tree() for _ in range(200)]
    got = cat(json.dumps(value).encode(), "line")[0]
    report(json.loads(got) == value and b"\n" not in got and b"\\u0" not in got.replace(b"\\u00", b""), "a line reads back")
    # what JSON readers must agree on
    bad = ['{"a":1,"a":2}', "[1,]", "{'a':1}", "[1 2]", "01", "nul", '"\t"', '"\\u0000"', '"\\ud800"', "[", "", " ", "1 2", "1e999"]
    report(all(cat(b.encode(), "line")[1] == 1 for b in bad), "refused JSON is refused", *[b for b in bad if cat(b.encode(), "line")[1] != 1])
    big = {"x": 1000000000000000019884624838656, "y": [-9223372036854775809, 9223372036854775807], "s": "99999999999999999999 \\\" 99999999999999999999"}
    got = cat(json.dumps(big).encode(), "line")[0]
    report(json.loads(got) == {"x": float(big["x"]), "y": [float(big["y"][0]), big["y"][1]], "s": big["s"]}, "integers beyond 64 bits become reals", got)


SCALARS = """12 -12 +12 0 00 -0 +0 0_0 1_000 1__0 _1 -_1 010 0o10 08 09 018 0b101 -0b1_1 0b 0b_ 0b2 0B1 0x1F -0x1f 0x 0x_ 0xg 0X1 1:30 1:60 1:5:30 190:20:30
-1:30 01:30 0:30 1:30:60 1:2:3.5 1:2.25 20:30.15 1:60.0 1:5. 1: :1 1:a 1.5 1. .5 -.5 +.5 . -. 1.e+3 1.0e3 1.0e+3 1.0E-3 1e3 1e-3 1E5 1.5e 1.5e+ 1_0.5_0 ._5 .5_ ._
1_.5 0.1 00.1 08.5 0x1.8 1.2.3 12e03 .inf .Inf .INF -.inf +.inf .iNF .nan .NaN .NAN -.nan .Nan yes Yes YES yEs no No NO on On ON off Off OFF oN true True TRUE tRUE
false False FALSE y n Y N ~ null Null NULL nULL none None = == << <<< 2001-12-14 2001-12-14t21:59:43.10-05:00 2001-1-1 12:30:45 9223372036854775807 -9223372036854775808
9223372036854775808 -9223372036854775809 0x7fffffffffffffff 0x8000000000000000 -0x8000000000000000 99999999999999999999 1.7976931348623157e+308 1.0e+400 1.0e-400
abc a_b -a +a 1a 0a a1 1-2 1+2 1,000 $x bf16 train[3:14] a/b.c ${oc.env:X} e5 .e5 1e 1.0e+5_0 685_230.15 6.8523015e+5 685230.15 -1.5 +1.5 - + 0.0 -0.0 0b0_ 0x0_ 0_ 1_
12345678901234567890.5 1:00 60:00 0_1 0_8 +0b11 +0x1F +010 +1_0""".split()


def resolve(s):
    """What the C side should say of a plain scalar: PyYAML's value as JSON, but time stamps are text and what JSON lacks is refused."""
    try:
        loader = yaml.SafeLoader("")
        tag = loader.resolve(yaml.ScalarNode, s, (True, False))
        if tag.endswith(":timestamp"):
            return json.dumps(s)
        v = loader.construct_object(yaml.ScalarNode(tag, s), deep=True)
    except (yaml.YAMLError, ValueError):
        return "refused"
    if isinstance(v, float) and not math.isfinite(v) or isinstance(v, int) and not -2 ** 63 <= v < 2 ** 63:
        return "refused"
    return json.dumps(v)


def random_scalar():
    return "".join(RNG.choice("0123456789+-._:eExbyYnNoOfFsSlLuUaAtT~" if RNG.random() < 0.5 else "01.:_-+eE5") for _ in range(RNG.randrange(1, 9)))


DOCS = [
    "", "# nothing\n", "---\n", "---\n...\n", "a: 1\n", "- 1\n- [x, 'y', \"z\\n\"]\n", "a: {b: c, d: [1, 2.5, on]}\n", "a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\n",
    "a: &x {b: 1}\ny: &y {b: 2, z: 3}\nd:\n  k: 0\n  <<: [*x, *y]\n", "a: &x {b: 1}\nd:\n  <<: *x\n  <<: {b: 5, q: 1}\n  b: 9\n", "a: 1\na: 2\n", "{a: 1, b: 2, a: 3}\n",
    "s: |\n  one\n  two\nf: >\n  one\n  two\n\n  three\n", "k: !!str 12\nl: !!int '12'\nm: !!float 3\nn: !!bool YES\no: !!null x\np: ! 12\nq: ! '12'\n", "? a\n: b\n", "a:\nb: ~\nc: ''\n",
    "a: *nope\n", "a: &a [*a]\n", "a: &a 1\nb: &a 2\n", "--- 1\n--- 2\n", "a: !foo 1\n", "a: !!binary aGk=\n", "a: [1\n", "a: b: c\n", "\ta: 1\n", "a: 'x\n", "{<<: 3}\n", "{<<: [1]}\n",
    "a: '<<'\n", "a: <<\n", "a: =\n", "=: a\n", "'<<': 1\n", "a: &k key\n*k : v\n", "- &a {x: &b [1]}\n- *a\n- *b\n", "a: 12\\\n", "a: \"\\u00e9\\U0001F600\\x41\"\n", "\ufeffa: 1\n",
    "a: 1\n...\n", "a: 1\n... x\n", "%YAML 1.1\n---\na: yes\n", "a: @x\n", "a: `x\n", "a: %x\n", "a: [a, b: c, ? d]\n", "[a]: b\n", "{a: b}: c\n", "a: multi\n  line\n  plain\n", "a: x #c\nb: x#c\n",
    "a: &x\nb: *x\n", "!!map {a: 1}\n", "!!seq [1]\n", "!!set {a}\n", "!!str [1]\n", "- - - - x\n", "a:\n- 1\n- 2\n", "a: 0o17\nb: 1e3\nc: 1_000\n", "x: 2024-01-02\n", "\"a\\0b\": 1\n",
]


def keys_as_text(node):
    """PyYAML's tree with mapping keys as written; time stamps as text."""
    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader, n):
        loader.flatten_mapping(n)
        out = {}
        for k, v in n.value:
            if not isinstance(k, yaml.ScalarNode):
                raise yaml.YAMLError("key")
            loader.construct_object(k, deep=True)
            out[k.value] = loader.construct_object(v, deep=True)
        return out

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, n: n.value)
    for lost in ("binary", "set", "omap", "pairs"):
        Loader.add_constructor(f"tag:yaml.org,2002:{lost}", yaml.SafeLoader.construct_undefined)
    return yaml.load(node, Loader)


def has_nul(v):
    if isinstance(v, dict):
        return any("\0" in k or has_nul(x) for k, x in v.items())
    return "\0" in v if isinstance(v, str) else isinstance(v, list) and any(map(has_nul, v))


def load(doc):
    try:
        v = keys_as_text(doc)
        return "refused" if has_nul(v) else json.dumps(v, sort_keys=True)
    except (yaml.YAMLError, ValueError, RecursionError):
        return "refused"


def random_doc():
    # "1:," is a pair to PyYAML, but an error to libyaml
    fine = [s for s in SCALARS if resolve(s) != "refused" and not s.endswith(":")] + ["'q'", '"dq"', "plain text"]

    def quoted():       # libyaml refuses the surrogate escapes that json.dumps makes
        return json.dumps("".join(c for c in string() if c < "\U00010000"))

    def flow(depth):
        kind = RNG.randrange(3 if depth > 3 else 6)
        if kind < 2:
            return RNG.choice(fine)
        if kind == 2:
            return quoted()
        if kind < 5:
            return "{" + ", ".join(f"k{RNG.randrange(4)}: {flow(depth + 1)}" for _ in range(RNG.randrange(4))) + "}"
        return "[" + ", ".join(flow(depth + 1) for _ in range(RNG.randrange(4))) + "]"

    return "".join(f"top{i}: {flow(0)}\n" for i in range(RNG.randrange(1, 5)))


def check_yaml():
    scalars = SCALARS + [random_scalar() for _ in range(20000)]
    got = cat("\n".join(scalars).encode() + b"\n", "scalars")[0].decode().split("\n")[:-1]
    same("plain scalars", got, [resolve(s) for s in scalars], scalars)

    def ours(doc):
        out, code, _ = cat(doc.encode(), "yaml")
        return "refused" if code else out.decode()

    same("documents", [ours(d) for d in DOCS], [load(d) for d in DOCS], DOCS)
    docs = [random_doc() for _ in range(150)]
    same("random documents", [ours(d) for d in docs], [load(d) for d in docs], docs)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(8))
    out, code, words = cat(bomb.encode(), "yaml")
    report(code == 1 and "100,000" in words, "nested aliases are refused", words)
    out, code, words = cat(b"[" * 5000 + b"]" * 5000, "yaml")
    report(code == 1 and not out, "deep nesting is refused", words)


def check_digests():
    sizes = list(range(0, 300)) + [1000, 4095, 4096, 100000]
    data = [RNG.randbytes(n) for n in sizes]
    same("SHA-256", [cat(d, "sha256")[0].decode() for d in data[::5]], [hashlib.sha256(d).hexdigest() for d in data[::5]], sizes[::5])
    for n in (55, 56, 63, 64, 119, 120, 128):
        same(f"SHA-256 of {n} bytes", [cat(b"x" * n, "sha256")[0].decode()], [hashlib.sha256(b"x" * n).hexdigest()], [n])


check_json()
if yaml:
    check_yaml()
check_digests()
print(f"1..{COUNT}")
sys.exit(FAILED != 0)
