#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Published models as header-only checkpoints: the plan counts every byte of them, says what a rank must hold for each residency
# and mesh, and refuses with the unit that does not fit. No weights are needed, no disk and no time; DSPARK_TEST_QUICK takes three.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

top=$(cd "$top_srcdir" && pwd)
tests=$top/tests
cd "$tmp" || exit 99
need_python "published models" json || done_testing

# digits.py LINE [PLAN]: whether headers.py's tables say what is published of a model, and whether a plan does.
cat >digits.py <<'END'
import json, sys

line = json.load(open(sys.argv[1]))
unused = [sum(s[i] for s in line["skipped"]) for i in (1, 2, 3)]
have = {
    "tensors": line["tensors"],
    "files": line["files"],
    "G": line["parameters"],
    "uG": line["parameters"] - unused[1],
    "GB": line["bytes"],
    "uGB": line["bytes"] - unused[2],
    "+GB": unused[2],
}
if len(sys.argv) > 2:
    c = json.loads(open(sys.argv[2]).readline())["checkpoint"]
    have = {
        "tensors": c["tensors"],
        "uG": c["used_parameters"],
        "GB": c["bytes"],
        "uGB": c["used"],
        "+GB": c["bytes"] - c["used"],
    }

faults = 0
for what, text in line["published"].items():
    if what in have:
        digits = len(text.partition(".")[2])
        value = f"{have[what] / 1e9:.{digits}f}" if "G" in what else str(have[what])
        print(f"{what}: {have[what]:,}, published {text}")
        faults += value != text
sys.exit(faults > 0)
END
"$PYTHON" "$tests/headers.py" --list >list
while read -r model; do
	"$PYTHON" "$tests/headers.py" "$model" >line
	check "$model: the tables give the published numbers" "$PYTHON" digits.py line
done <list

# ---- plans --------------------------------------------------------------------------------------------------------------
# recipe MODEL: recipe.yaml for it, which make_tokens.py's options below fit
recipe() {
	cat >recipe.yaml <<-END
	dist_env:
	  backend: gloo
	recipe_args:
	  target_model_name_or_path: "$1"
	  train_data_path: "rows.jsonl"
	  seq_length: 4096
	  micro_batch_size: 1
	  shuffle_seed: 42
	  cache_output_dir: out
	  cache_dtype: bf16
	  cache_shard_size: 2
	  draft_num_hidden_layers: 5
	  chat_template: "{{ messages }}"
	END
}
# The cache need not fit on the disk of whoever runs this: -f.
plan() {
	dspark-plan -q -f -c recipe.yaml --device cpu --compute-dtype bf16 "$@"
}

# What a rank must hold, by the headers in the files alone, in bf16. Memory is counted in whole panels, with a handle for each
# weight: a part in a thousand, of packed weights with their scales in 200, and 8 KiB a tensor may come on top, and 64 KiB
# for what is in no file (rope frequencies).
cat >held.py <<'END'
import collections, fnmatch, glob, json, math, os, struct, sys

def headers(model):
    for path in sorted(glob.glob(os.path.join(model, "*.safetensors"))):
        with open(path, "rb") as f:
            head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            del head["__metadata__"]
            end = max(t["data_offsets"][1] for t in head.values())
            assert os.path.getsize(path) == f.tell() + end, path
            yield from head.items()

class Tensor:
    def __init__(self, name, t):
        begin, end = t["data_offsets"]
        self.name, self.rows = name, t["shape"][0]
        self.stored = end - begin
        self.expert = ".mlp.experts." in name
        self.layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        wide = len(t["shape"]) == 1 or name.endswith(".mlp.gate.weight")
        packed = t["dtype"] == "F8_E4M3" or name.endswith("_scale_inv")
        self.memory = self.stored if packed else math.prod(t["shape"]) * (4 if wide else 2)
        self.parameters = 0 if name.endswith("_scale_inv") else math.prod(t["shape"])

    def share(self, members):
        return -(-self.rows // members) * (self.stored // self.rows)

class Target:
    """What a plan for a world must say: [least, most] bytes of a rank."""

    def __init__(self, model):
        self.all = [Tensor(*t) for t in headers(model)]
        with open(os.path.join(model, "config.json")) as f:
            config = json.load(f)
        self.slack = 200 if "quantization_config" in config else 1000
        tied, layers = config["tie_word_embeddings"], config["num_hidden_layers"]
        self.used = [t for t in self.all if (t.layer or 0) < layers and not (tied and t.name == "lm_head.weight")]
        tensors = [t for t in self.used if t.name != "lm_head.weight"]
        self.once = [t for t in tensors if t.layer is None]
        self.dense = [t for t in tensors if t.layer is not None and not t.expert]
        self.experts = [t for t in tensors if t.expert]
        self.small = sum(t.memory for t in self.once if t.name == "model.norm.weight")

    def layer(self, tensors, what):
        sums = collections.Counter()
        for t in tensors:
            sums[t.layer] += what(t)
        return max(sums.values(), default=0)

    def limits(self, least, most, tensors):
        return least, most + most // self.slack + 8192 * tensors + (64 << 10)

    def share(self, weights, ep, n):
        """Bytes that a rank keeps (of gather the first one, whose share is never smaller), and weights."""
        if weights == "resident":
            kept = self.once + self.dense
            return sum(t.memory for t in kept) + sum(t.memory for t in self.experts) // ep, kept + 2 * self.dense
        if weights != "gather":
            return self.small, [None]
        dense = self.small + sum(t.share(n) for t in self.dense)
        if n > ep:
            return dense + sum(t.share(n // ep) for t in self.experts) // ep, [None]
        return dense + sum(t.memory for t in self.experts) // ep, 2 * self.dense

    def held(self, weights, ep, n):
        b, kept = self.share(weights, ep, n)
        return self.limits(self.small if weights == "gather" else b, b, len(kept))

    def together(self, ep, n):
        """All ranks of a group that gathers: every byte of the layers is with somebody."""
        return sum(t.stored for t in self.dense) + sum(t.stored for t in self.experts) * n // max(n, ep)

    def working(self, weights, ep, n):
        if weights == "resident":
            return 0, 0
        layer = self.layer(self.dense, lambda t: t.memory)
        wire = self.layer(self.dense, lambda t: t.stored)
        least, most = layer, 2 * layer
        if weights != "gather" or n > ep:
            experts = self.layer(self.experts, lambda t: t.memory) // ep
            least += max((t.memory for t in self.experts), default=0)
            most += 2 * experts
            wire = max(wire, experts)
        return self.limits(least, most + ("gather" in weights) * wire, 64)

class Judge:
    def __init__(self):
        self.faults = 0

    def want(self, what, have, least, most):
        if not least <= have <= most:
            self.faults += 1
            print(f"{what}: {have:,}, not {least:,}" + (f" to {most:,}" if most > least else ""))

def show(world, ep, n, m, share):
    first, last = m["ranks"]
    numbers = [m[k] for k in ("held", "working", "activations", "buffers", "total")] + [share]
    return (f"{world:5} {ep:3} {world // n:4} {m['weights']:>13} {first:4}-{last:<4}" +
            "".join(f"{x / 2**30:12.3f}" for x in numbers))

def judge(j, path, target, plan):
    run, world, c = plan["run"], plan["world"], plan["checkpoint"]
    ep, n = run["ep_size"], world // run["dp_replicate_size"]
    for key, have in (
        ("bytes", sum(t.stored for t in target.all)),
        ("used", sum(t.stored for t in target.used)),
        ("tensors", len(target.all)),
        ("used_tensors", len(target.used)),
        ("used_parameters", sum(t.parameters for t in target.used)),
    ):
        j.want(f"{path}: checkpoint.{key}", c[key], have, have)
    unused, pattern = {t.name for t in target.all} - {t.name for t in target.used}, c["unused"] or ""
    named = {t.name for t in target.all if fnmatch.fnmatchcase(t.name, pattern)}
    j.want(f"{path}: tensors '{pattern}' that are used, or unused ones that are not", len(unused ^ named), 0, 0)
    ranks, held = collections.Counter(), collections.Counter()
    for m in plan["memory"]:
        weights, (first, last) = m["weights"], m["ranks"]
        where = f"{path}: {weights}: ranks {first} to {last}"
        print(show(world, ep, n, m, target.share(weights, ep, n)[0]))
        j.want(f"{where}: first", first, *[ranks[weights]] * 2)
        j.want(f"{where}: held", m["held"], *target.held(weights, ep, n))
        j.want(f"{where}: working", m["working"], *target.working(weights, ep, n))
        parts = sum(m[k] for k in ("held", "working", "activations", "buffers"))
        j.want(f"{where}: total", m["total"], parts, parts)
        ranks[weights] += last - first + 1
        held[weights] += (last - first + 1) * m["held"]
    group = {"gather", "gather,stream"} if n > 1 else set()
    j.want(f"{path}: residencies missing", len(({"resident", "stream"} | group) ^ set(ranks)), 0, 0)
    for weights in ranks:
        j.want(f"{path}: {weights}: ranks", ranks[weights], world, world)
    if n > 1:
        least = target.together(ep, n) * (world // n)
        j.want(f"{path}: gather: all ranks together hold", held["gather"], least, least * 9)

def main(model, line, *plans):
    line = json.load(open(line))
    j, target = Judge(), Target(model)
    j.want("bytes of the headers", sum(t.stored for t in target.all), line["bytes"], line["bytes"])
    skipped = sum(n for _, n, _, _ in line["skipped"])
    j.want("skipped tensors", len(target.all) - len(target.used), skipped, skipped)
    print("world  ep repl       weights ranks  " +
          "".join(f"{k:>12}" for k in ("held GiB", "working", "activations", "buffers", "total", "by headers")))
    for path in plans:
        with open(path) as f:
            judge(j, path, target, json.loads(f.readline()))
    return j.faults > 0

sys.exit(main(*sys.argv[1:]))
END

tokens=
if need_python "plans that can run" numpy,xxhash; then tokens=y; fi

# meshes MODEL: WORLD:EP:REPLICATE of its plans
meshes() {
	case $1 in
	GLM*) echo 1:1:1 8:8:1 16:8:1 32:8:2 64:1:1 64:64:1 ;;
	*-A*) echo 1:1:1 8:1:1 8:8:1 16:16:1 16:8:2 32:8:1 32:32:1 ;;
	*) echo 1:1:1 8:1:1 16:1:1 16:1:2 32:1:1 ;;
	esac
}

models="Qwen3-0.6B Qwen3-8B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B GLM-5 GLM-5.2 GLM-5.2-FP8 Qwen3-8B-FP8 Qwen3-30B-A3B-FP8"
if [ -n "${DSPARK_TEST_QUICK-}" ]; then models="Qwen3-0.6B Qwen3-235B-A22B GLM-5.2-FP8"; fi
for model in $models; do
	"$PYTHON" "$tests/headers.py" "$model" "$model" >line 2>err
	status=$?
	if [ "$status" -eq 77 ]; then
		skip "$model" "$(cat err)"
		rm -rf "$model"
		continue
	fi
	made() { cat err; [ "$status" -eq 0 ] && [ "$(du -sk "$model" | cut -f 1)" -lt 65536 ]; }
	check "$model: a header-only checkpoint takes no space" made
	recipe "$model"
	plans=
	planned() {
		for mesh in $(meshes "$model"); do
			echo "$mesh" | {
				IFS=: read -r world ep replicate
				plan --world "$world" --set "distributed.ep_size=$ep" --set "distributed.dp_replicate_size=$replicate"
			} >"plan-$mesh" || return
			plans="$plans plan-$mesh"
		done
	}
	check "$model: estimates for 1 to 64 ranks" planned
	check "$model: they print the published numbers" "$PYTHON" digits.py line plan-1:1:1
	if [ -n "$tokens" ]; then
		runnable() {
			"$PYTHON" "$tests/make_tokens.py" --model "$model" --rows 64 --seq-length 4096 --lengths quarter \
				--chat-template "{{ messages }}" tokens &&
			plan -t tokens --world 8 >plan-runnable && head -n 1 plan-runnable | grep -q '"runnable":true' &&
			[ "$(grep -c '"record":"range"' plan-runnable)" -eq 8 ] && plans="$plans plan-runnable"
		}
		check "$model: a plan that can run" runnable
	fi
	# shellcheck disable=SC2086 # names without blanks
	held() { "$PYTHON" held.py "$model" line $plans >table; status=$?; cat table; return "$status"; }
	check "$model: every byte is counted, ranks hold what they must" held
	sed 's/^/# /' table
done

# ---- what fits ----------------------------------------------------------------------------------------------------------
# Without --weights, the first that fits: resident, gather, gather,stream, stream.
cat >chosen.py <<'END'
import json, sys

path, unit, wanted = sys.argv[1:]
with open(path) as f:
    plan = json.loads(f.readline())
memory = int(unit) << 30
chosen, need = plan["run"]["weights"], {m["weights"]: m["total"] for m in reversed(plan["memory"])}
print(f"chosen: {chosen}, {wanted} is wanted of {memory}; need: {need}")
if chosen != wanted or need[chosen] > memory:
    sys.exit(1)
for weights in ("resident", "gather", "gather,stream", "stream"):
    if weights == chosen:
        break
    if need.get(weights, memory + 1) <= memory:
        sys.exit(f"{weights} fits, too")
END

# expect CODE TEXT COMMAND...: exit status and one sentence on stderr
expect() {
	code=$1 text=$2
	shift 2
	"$@" >stdout 2>err
	status=$?
	cat err
	if [ "$status" -ne "$code" ]; then
		echo "exit $status, not $code: $*"
		return 1
	fi
	if ! grep -q -e "$text" err || [ "$(wc -l <err)" -ne 1 ] || [ -s stdout ]; then
		echo "that is not one sentence with '$text'"
		return 1
	fi
}

# estimate OPTION...: as plan, but refusing what does not fit
estimate() {
	dspark-plan -q -c recipe.yaml --device cpu --compute-dtype bf16 "$@"
}

# chosen WEIGHTS GIB OPTION...
chosen() {
	wanted=$1 gib=$2
	shift 2
	estimate --memory "${gib}G" "$@" >plan && "$PYTHON" chosen.py plan "$gib" "$wanted"
}
model=Qwen3-235B-A22B
if [ -d $model ]; then
	recipe $model
	ep() { echo "--set distributed.ep_size=$1"; }
	# shellcheck disable=SC2046
	{
	check "one rank of 500 GiB holds the 235B" chosen resident 500
	check "one of 4 GiB streams it" chosen stream 4
	check "16 of 80 GiB, ep 8: resident" chosen resident 80 --world 16 $(ep 8)
	check "16 of 40 GiB, ep 8: gathered" chosen gather 40 --world 16 $(ep 8)
	check "16 of 20 GiB, ep 8: gathered and streamed" chosen gather,stream 20 --world 16 $(ep 8)
	check "resident in 20 GiB is refused" expect 1 "^dspark-plan: resident weights need 43[0-9] GiB a rank.*--memory allows 20.0 GiB" \
		estimate --memory 20G --weights resident
	check "and what does fit is offered" expect 1 "; --weights stream fits, in 3.6[0-9] GiB$" \
		estimate --memory 20G --weights resident
	check "a block of experts that does not fit is named" expect 1 "allows 1.00 GiB: a block of the experts of layer 0, 2.25 GiB" \
		estimate --memory 1G --world 2 $(ep 2)
	check "a layer that does not fit is named" expect 1 "allows 256 MiB: attention and dense part of layer 0, 138 MiB" \
		estimate --memory 256M
	check "-f warns instead" estimate -f --memory 256M
	}
fi

# What README says of GLM-5.2 on devices of 80 and 141 GB is what plans say; what does not fit there is refused, with what does.
cat >glm.py <<'END'
import json, re, subprocess, sys

MODELS = "GLM-5.2", "GLM-5.2-FP8"
WAYS = "resident", "gather", "gather,stream", "stream"
DEVICES = 80 * 10**9, 141 * 10**9
COMMAND = "dspark-plan -q -c recipe.yaml --device cpu --compute-dtype bf16".split()
faults = 0

def want(what, have, wanted):
    global faults
    if have != wanted:
        faults += 1
        print(f"{what}: {have!r}, not {wanted!r}")

def plan(mesh, model, memory=0, weights="auto"):
    """The plan record and what stderr says."""
    world, ep = mesh
    command = [*COMMAND, "--world", world, "--set", f"distributed.ep_size={ep}", "--weights", weights]
    command += ["--set", f"recipe_args.target_model_name_or_path={model}"]
    p = subprocess.run(command + ["--memory", str(memory)] * (memory > 0), capture_output=True, text=True)
    if p.returncode not in (0, 1) or bool(p.stdout) == bool(p.stderr):
        sys.exit(f"{command}: status {p.returncode}: {p.stderr}")
    return json.loads(p.stdout.split("\n")[0]) if p.stdout else None, p.stderr

def gigabytes(n):
    return f"{n / 1e9:,.0f}" if n >= 100e9 else f"{n / 1e9:.1f}"

def refused(mesh, model, memory, weights, fits):
    have, words = plan(mesh, model, memory, weights)
    sentence = (f"dspark-plan: {weights} weights need [^:;]* a rank, but --memory allows [^:;]*: "
                f"a rank holds [^:;]* of them all the time; --weights {fits} fits, in [^:;]*\n")
    if have or not re.fullmatch(sentence, words):
        want(f"{model} {mesh} {memory}: {weights}", words, sentence)

def row(mesh, cells):
    needs = []
    for model in MODELS:
        need = {}
        for m in plan(mesh, model)[0]["memory"]:
            need[m["weights"]] = max(m["total"], need.get(m["weights"], 0))
        needs.append(need)
    for way, cell in zip(WAYS, cells):
        want(f"{mesh} {way}", cell, " / ".join(gigabytes(n[way]) for n in needs if way in n))
    for memory, cell in zip(DEVICES, cells[len(WAYS):]):
        chosen = [plan(mesh, m, memory)[0]["run"]["weights"] for m in MODELS]
        want(f"{mesh} {memory}", cell, " / ".join(chosen))
        for model, need, choice in zip(MODELS, needs, chosen):
            want(f"{mesh} {memory}: first", choice, next(w for w in WAYS if need.get(w, memory + 1) <= memory))
            for way in (w for w in need if need[w] > memory):
                refused(mesh, model, memory, way, choice)

def table(readme):
    rows = re.findall(r"^\| (\d+), (\d+) \|(.*)\|$", open(readme).read(), re.M)
    want("rows", [r[:2] for r in rows], [tuple(m.split(",")) for m in "1,1 8,8 16,8 16,16 32,8 32,32 64,8 64,64".split()])
    for world, ep, cells in rows:
        row((world, ep), [c.strip() for c in cells.split("|")])

def least():
    """What a refusal says that it takes at least is enough, and a byte less is not."""
    for model in MODELS:
        for mesh, memory in ((("1", "1"), 1 << 29), (("8", "8"), 1 << 30), (("16", "8"), 1 << 29)):
            words = plan(mesh, model, memory)[1]
            print(words, end="")
            bytes, way = re.search(r"allow at least [^;(]* \((\d+) bytes\), for (\S+) weights", words).groups()
            good = plan(mesh, model, int(bytes), way)[0]
            want(f"{model} {mesh}: needs", good and max(m["total"] for m in good["memory"] if m["weights"] == way), int(bytes))
            want(f"{model} {mesh}: a byte less", plan(mesh, model, int(bytes) - 1, way)[0], None)

table(sys.argv[1]) if len(sys.argv) > 1 else least()
sys.exit(faults > 0)
END
if [ -d GLM-5.2 ] && [ -d GLM-5.2-FP8 ]; then
	recipe GLM-5.2
	check "GLM-5.2: README's table, and each refusal in it" "$PYTHON" glm.py "$top/README.md"
	check "GLM-5.2: what a refusal says that it takes at least" "$PYTHON" glm.py
	check "GLM-5.2: streamed on one device" chosen stream 74
	check "GLM-5.2: a layer that does not fit is named" expect 1 "allows 512 MiB: attention and dense part of layer 0, 765 MiB" \
		estimate --memory 512M
	check "GLM-5.2: a rank's experts that do not fit are named" expect 1 \
		"allows 1.00 GiB: a block of the experts of layer 3, 2.25 GiB.*raise distributed.ep_size" \
		estimate --memory 1G --world 8 --set distributed.ep_size=8
fi
done_testing
