#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""dspark-tokenize: chat rows to tokens.safetensors

Renders each row with the chat template, tokenises the text once, and marks the tokens that a draft model shall learn
to predict. One pass: rows stream through worker processes into two unlinked spill files (ids, masks), only row offsets
stay in memory, and the output is assembled at the end, because a safetensors header must know the lengths.

A row is `ids` (the tokens that its text gives, cut to seq_length, never padded) and `mask` (1: supervised). Rules:
  - with {% generation %} in the template: the blocks' character spans, turned into tokens;
  - otherwise: what each assistant message adds to the token ids of the messages before it;
  - then mask_generation_prompt and mask_reasoning_content clear bits.
tokenizer_xxh3_128 is XXH3-128 over, for each tokenizer file (TOKENIZER_FILES) in byte order of the names: name, NUL,
size as 8 bytes little-endian, contents. The chat template is left to chat_template_sha256; where the tokenizer holds
several named templates, and a manifest thus has no hash of one, that says NO_SHA256.
"""

import array
import ast
import collections
import errno
import fnmatch
import hashlib
import json
import multiprocessing
import os
import re
import signal
import stat
import struct
import sys
import tempfile
import time
import warnings

PROGRAM = "dspark-tokenize"
VERSION = "@VERSION@"
USAGE = """\
usage: dspark-tokenize -c RECIPE [--set KEY=VALUE]... -o TOKENS [-j N] [--skip-invalid] [--min-loss-tokens N] [ROWS | -]
       dspark-tokenize -c RECIPE [--set KEY=VALUE]... --show ROW [ROWS | -]
"""
OPTIONS = [  # short, long, argument, help
    ("c", "config", "RECIPE", "the YAML recipe"),
    ("", "set", "KEY=VALUE", "override a key of the recipe; also --recipe_args.KEY VALUE"),
    ("o", "output", "TOKENS", "the tokens.safetensors to write"),
    ("j", "jobs", "N", "worker processes (default: one per core); the output is the same for every N"),
    ("", "skip-invalid", "", "drop and count invalid rows instead of refusing them"),
    ("", "min-loss-tokens", "N", "drop and count rows with fewer than N supervised tokens"),
    ("", "show", "ROW", "print row ROW (from 0, in data set order) with its supervised tokens marked:\n"
     "reverse video on a terminal, between \u27e6 and \u27e7 elsewhere"),
    ("q", "quiet", "", "no progress, summary or warnings"),
    ("v", "verbose", "", "say more"),
    ("h", "help", "", "show this help"),
    ("V", "version", "", "show the version"),
]
HELP_TAIL = """
ROWS replaces the recipe's train_data_path as the place where rows are read from (- is JSON Lines on standard input);
the path of the recipe is still what TOKENS records.
Exit status: 0 done, 1 refused, 2 usage, 3 failed (try again).
"""

# What dspark reads of recipe_args, and what a training recipe with the same file may hold beside it.
RECIPE_KEYS = """
    target_model_name_or_path train_data_path train_split seq_length micro_batch_size num_workers shuffle_seed
    trust_remote_code cache_output_dir cache_dtype cache_shard_size target_layer_ids draft_num_hidden_layers chat_template
    mask_reasoning_content mask_generation_prompt target_num_hidden_layers target_force_hf target_attn_implementation
    target_attn_backend target_dispatcher target_experts target_enable_fsdp_optimizations
    attention_backend aux_layer_ids block_size cached_target_path ce_loss_alpha ckpt_every_steps confidence_head_alpha
    confidence_head_stop_gradient confidence_head_with_markov cp_mode cp_zigzag draft_attn_implementation
    draft_gradient_checkpointing draft_vocab_size draft_weights_path fc_norm freeze_embeddings grad_accumulation_steps
    l1_loss_alpha lk_kl_decay lk_kl_scale lk_loss_type log_every_steps loss_decay_gamma markov_head_type markov_rank
    mask_token_id max_grad_norm multimodal norm_output num_anchors num_depths num_epochs output_dir packed_sequence_size
    parallel_drafting remote_max_retries remote_timeout remote_url remote_urls save_checkpoint_every_epoch
    selected_token_ids_path sglang_args shard_dense_target target_model_backend target_prefetch_depth train_shuffle
    ttt_steps val_data_path val_split vllm_args
""".split()
SECTIONS = ("recipe_args", "dist_env", "distributed")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
                   "*.tiktoken", "tokenization*.py")
NO_SHA256 = "not available: the template is not a string"
GENERATION = re.compile(r"\{%-?\s+generation\s+-?%\}")
BATCH_ROWS, BATCH_BYTES = 64, 1 << 20


class Stop(Exception):
    """Ends the program: one sentence and an exit code (1 refused, 2 usage, 3 failed)."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class RowError(Exception):
    """What is wrong with one row."""


class Signalled(BaseException):
    """A signal that ends the program; not an Exception, so that no handler of row errors takes it."""


def oneline(e, limit=300):
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= limit else text[:limit] + "..."


def strerror(e):
    return os.strerror(e.errno).lower() if getattr(e, "errno", None) else oneline(e)


def say(message):
    """One line on stderr; a stderr that is gone is no reason to stop."""
    try:
        os.write(2, f"{PROGRAM}: {message}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def put(text):
    """Write to stdout, where a failure counts."""
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        while data:
            data = data[os.write(1, data):]
    except OSError as e:
        raise Stop(3, f"cannot write standard output: {strerror(e)}")


# ---------------------------------------------------------------------------------------------- command line

def usage_error(message):
    return Stop(2, message)


def number(name, value, least):
    if not re.fullmatch(r"[0-9]+", value) or int(value) < least:
        raise usage_error(f"{name} wants an integer of at least {least}, not '{value}'")
    return int(value)


def parse_args(argv):
    """argv to a dict by long option name; 'set' is a list of (key, text), 'rows' the operand or None."""
    arg_of = {long: arg for _, long, arg, _ in OPTIONS}
    long_of = {short: long for short, long, _, _ in OPTIONS if short}
    got, operands, overrides = {}, [], []
    argv = collections.deque(argv)

    def store(long, shown, value):
        if long == "set":
            key, eq, text = value.partition("=")
            if not eq or not key:
                raise usage_error(f"--set wants KEY=VALUE, not '{value}'")
            overrides.append((key, text))
        else:
            got[long] = value

    def wanted(shown):
        if not argv:
            raise usage_error(f"option '{shown}' wants an argument")
        return argv.popleft()

    while argv:
        word = argv.popleft()
        if word == "--":
            operands += argv
            break
        if word == "-" or not word.startswith("-"):
            operands.append(word)
        elif word.startswith("--"):
            name, eq, value = word[2:].partition("=")
            if name not in arg_of and "." in name:
                if not eq:                        # the reference's spelling: a bare --a.b is true
                    value = argv.popleft() if argv and not argv[0].startswith("--") else "True"
                overrides.append((name, value))
            elif name not in arg_of:
                raise usage_error(f"unknown option '--{name}'")
            elif not arg_of[name] and eq:
                raise usage_error(f"option '--{name}' takes no argument")
            else:
                store(name, "--" + name, value if eq else wanted("--" + name) if arg_of[name] else True)
        else:
            rest = word[1:]
            while rest:
                short, rest = rest[0], rest[1:]
                if short not in long_of:
                    raise usage_error(f"unknown option '-{short}'")
                long = long_of[short]
                if arg_of[long]:
                    store(long, "-" + short, rest or wanted("-" + short))
                    rest = ""
                else:
                    store(long, "-" + short, True)
    if len(operands) > 1:
        raise usage_error(f"one ROWS operand at most, not also '{operands[1]}'")
    got.update(set=overrides, rows=operands[0] if operands else None)
    return got


def check_args(opt):
    if "config" not in opt:
        raise usage_error("a recipe is needed (-c RECIPE)")
    if "show" in opt:
        for long in ("output", "jobs", "skip-invalid", "min-loss-tokens"):
            if long in opt:
                raise usage_error(f"--{long} has no meaning with --show")
        opt["show"] = number("--show", opt["show"], 0)
    elif "output" not in opt:
        raise usage_error("an output file is needed (-o TOKENS), or --show ROW")
    opt["jobs"] = number("-j", opt["jobs"], 1) if "jobs" in opt else len(os.sched_getaffinity(0))
    opt["min-loss-tokens"] = number("--min-loss-tokens", opt.get("min-loss-tokens", "0"), 0)
    if opt["rows"] == "-" and os.isatty(0):
        raise usage_error("standard input is a terminal; rows are read from a file or a pipe")


def help_text():
    lines = []
    for short, long, arg, text in OPTIONS:
        left = (f"-{short}, " if short else "    ") + f"--{long}" + (f" {arg}" if arg else "")
        first, *more = text.split("\n")
        lines += [f"  {left:26}  {first}"] + [" " * 30 + line for line in more]
    return USAGE + "\n" + "\n".join(lines) + "\n" + HELP_TAIL


# ---------------------------------------------------------------------------------------------- recipe

def literal(text):
    """A string as the Python-like literal that it may be, else itself."""
    words = {"none": None, "None": None, "true": True, "True": True, "false": False, "False": False}
    if text in words:
        return words[text]
    if len(text) > 1000:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def expand(value):
    """Replace ${VAR}, ${VAR,default}, ${oc.env:VAR,default}, then $VAR, in one string."""
    def env(name, default, shown):
        if name in os.environ:
            return os.environ[name]
        if default is None:
            raise Stop(1, f"recipe: environment variable '{name}' is not set; set it or write ${{{name},default}}")
        return default

    def braced(match):
        name = re.sub(r"^oc\.env:\s*", "", match[1].strip())
        name, comma, default = name.partition(",")
        return env(name.strip(), default.strip() if comma else None, match[0])

    value = re.sub(r"\$\{([^}]+)\}", braced, value)
    return re.sub(r"\$([A-Za-z_]\w*(?:\.\w+)*)", lambda m: env(m[1], None, m[0]), value, flags=re.ASCII)


def resolve(node):
    if isinstance(node, dict):
        return {key: resolve(value) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve(value) for value in node]
    return literal(expand(node)) if isinstance(node, str) else node


def nearest(key):
    import difflib
    found = difflib.get_close_matches(key, RECIPE_KEYS, 1)
    return f"; did you mean '{found[0]}'?" if found else ""


def apply_overrides(doc, overrides):
    for key, text in overrides:
        section, *path = key.split(".")
        if not path or "" in path or (section not in SECTIONS and section not in doc):
            raise usage_error(f"unknown recipe key '{key}'; keys look like 'recipe_args.seq_length'")
        if section == "recipe_args" and path[0] not in RECIPE_KEYS:
            raise usage_error(f"unknown recipe key '{key}'{nearest(path[0])}")
        node = doc
        for part in [section] + path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        value = literal(text)
        node[path[-1]] = resolve(value)


def read_recipe(path, overrides, warn):
    """The recipe's recipe_args with overrides applied, strings expanded and typed."""
    import yaml
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with open(path, encoding="utf-8") as f:
            doc = yaml.load(f.read(), Loader=loader)
    except OSError as e:
        raise Stop(3, f"cannot read recipe '{path}': {strerror(e)}")
    except UnicodeDecodeError as e:
        raise Stop(1, f"recipe '{path}' is not valid UTF-8: byte 0x{e.object[e.start]:02x} at offset {e.start}")
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise Stop(1, f"recipe '{path}{at}' is not valid YAML: {oneline(getattr(e, 'problem', None) or e)}")
    except (ValueError, RecursionError) as e:
        raise Stop(1, f"recipe '{path}' is not valid YAML: {oneline(e)}")
    if not isinstance(doc, dict):
        raise Stop(1, f"recipe '{path}' is not a mapping; it needs a 'recipe_args' section")
    doc = resolve(doc)
    apply_overrides(doc, overrides)
    args = doc.get("recipe_args")
    if not isinstance(args, dict):
        raise Stop(1, f"recipe '{path}' has no 'recipe_args' section")
    for key in args:
        if key not in RECIPE_KEYS:
            warn(f"recipe '{path}': unknown key 'recipe_args.{key}'{nearest(str(key))}")
    return args


class Settings:
    """The keys of recipe_args that decide rows, checked."""

    def __init__(self, args):
        self.args = args
        self.target = self.text("target_model_name_or_path")
        self.seq_length = self.integer("seq_length", None)
        if self.seq_length < 1:
            raise Stop(1, f"recipe: recipe_args.seq_length must be at least 1, not {self.seq_length}")
        self.shuffle_seed = self.integer("shuffle_seed", 42)
        self.trust_remote_code = self.flag("trust_remote_code")
        self.mask_reasoning = self.flag("mask_reasoning_content")
        self.mask_prompt = self.flag("mask_generation_prompt")
        self.chat_template = None if args.get("chat_template") is None else str(args["chat_template"])
        self.split = args.get("train_split")
        if self.split is not None and not isinstance(self.split, str):
            raise Stop(1, f"recipe: recipe_args.train_split must be a string, not {self.split!r}")
        self.data = args.get("train_data_path")
        if self.data is None:
            raise Stop(1, "recipe: recipe_args.train_data_path is missing")
        paths = [self.data] if isinstance(self.data, str) else self.data
        if not isinstance(paths, (list, tuple)) or not paths or not all(isinstance(p, str) and p for p in paths):
            raise Stop(1, "recipe: recipe_args.train_data_path must be a path or a list of paths")

    def text(self, key):
        value = self.args.get(key)
        if value is None or value == "":
            raise Stop(1, f"recipe: recipe_args.{key} is missing")
        return str(value)

    def integer(self, key, default):
        value = self.args.get(key)
        if value is None:
            if default is None:
                raise Stop(1, f"recipe: recipe_args.{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value in (
                float("inf"), float("-inf")) or value != int(value):
            raise Stop(1, f"recipe: recipe_args.{key} must be an integer, not {value!r}")
        return int(value)

    def flag(self, key):
        value = self.args.get(key)
        if value not in (None, False, True):
            raise Stop(1, f"recipe: recipe_args.{key} must be true or false, not {value!r}")
        return bool(value)


# ---------------------------------------------------------------------------------------------- rows

class Source:
    """Where rows come from. A batch is (kind, name, first, items, weight); kinds:
    lines: raw lines of a JSON Lines file, numbered from `first`; values: parsed rows, counted from `first`;
    index: row numbers of self.dataset. Weights add up to self.total (bytes or rows; 0: not known)."""

    def __init__(self, path, split, seed, operand):
        self.files, self.dataset, self.total, self.order = [], None, 0, None
        if path == "-" and operand:
            self.files = ["-"]
            return
        if isinstance(path, str):
            directory = os.path.isdir(path) and any(fnmatch.fnmatch(n, "*.parquet") for n in os.listdir(path))
            parquet = os.path.isfile(path) and path.lower().endswith(".parquet")
            if directory or parquet or is_hub_id(path):
                self.load(path, split, seed, parquet, directory)
                return
        self.files = [path] if isinstance(path, str) else list(path)
        for name in self.files:
            try:
                mode = os.stat(name)
            except OSError as e:
                raise Stop(3, f"cannot read rows '{name}': {strerror(e)}")
            if stat.S_ISDIR(mode.st_mode):
                raise Stop(1, f"rows '{name}' is a directory without .parquet files")
            if name.lower().endswith(".parquet"):
                raise Stop(1, f"rows '{name}': a list of files may hold JSON only; name the directory of the Parquet files")
            self.total += mode.st_size

    def load(self, path, split, seed, parquet, directory):
        try:
            import datasets
        except ImportError as e:
            raise Stop(3, f"rows '{path}' need the Python module 'datasets': {oneline(e)}")
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        part = re.match(r"^(\w+)\[(\d*):(\d*)\]$", split or "")
        base = part[1] if part else split or "train"
        where, name = (os.path.abspath(path), None) if directory else (path, None)
        if parquet:
            where, name = os.path.split(os.path.abspath(path))
        try:
            self.dataset = datasets.load_dataset(where, split=base, data_files=name,
                                                 verification_mode=datasets.VerificationMode.NO_CHECKS)
        except (OSError, ConnectionError) as e:
            kind = "cannot load" if parquet or directory else "is no file here, and loading it as a hub data set failed"
            raise Stop(3, f"rows '{path}': {kind}: {oneline(e)}")
        except Exception as e:                    # its own kinds, pyarrow's, ValueError for splits
            raise Stop(1, f"rows '{path}', split '{base}': {oneline(e)}")
        order = shuffled(len(self.dataset), seed)
        if part:
            order = order[int(part[2]) if part[2] else None:int(part[3]) if part[3] else None]
        self.order, self.total, self.name = order, len(order), path

    def batches(self):
        if self.dataset is not None:
            for i in range(0, len(self.order), BATCH_ROWS):
                chunk = [int(k) for k in self.order[i:i + BATCH_ROWS]]
                yield "index", self.name, 0, chunk, len(chunk)
        for name in self.files:
            try:
                yield from json_batches(name)
            except OSError as e:
                raise Stop(3, f"cannot read rows '{name}': {strerror(e)}")

    def rows(self, batch):
        """Yield (place, thunk) for each row of a batch; the thunk gives the row or raises RowError."""
        kind, name, first, items, _ = batch
        if kind == "values":
            for i, value in enumerate(items, first):
                yield f"{name}[{i}]", lambda value=value: value
        elif kind == "lines":
            for i, raw in enumerate(items, first):
                yield from line_rows(f"{name}:{i}", raw)
        else:
            columns = self.dataset[items]
            for j, i in enumerate(items):
                yield f"{name}[{i}]", lambda j=j: {key: column[j] for key, column in columns.items()}

    def find(self, wanted):
        """(place, thunk) of one row by its number in data set order."""
        count = 0
        if self.dataset is not None:
            count = len(self.order)
            if wanted < count:
                return next(self.rows(("index", self.name, 0, [int(self.order[wanted])], 1)))
        else:
            for batch in self.batches():
                for found in self.rows(batch):
                    if count == wanted:
                        return found
                    count += 1
        raise Stop(1, f"there is no row {wanted}: the data has {count} row{'' if count == 1 else 's'}, counted from 0")


def is_hub_id(path):
    """owner/name that is no local path and does not look like a file of rows."""
    return (re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None and not os.path.exists(path)
            and not os.path.isdir(path.split("/")[0])
            and os.path.splitext(path)[1].lower() not in (".json", ".jsonl", ".ndjson", ".parquet", ".txt"))


def shuffled(n, seed):
    """The order of n rows under a seed: numpy's PCG64 permutation, as `datasets` draws it."""
    import numpy
    if seed < 0:
        raise Stop(1, f"recipe: recipe_args.shuffle_seed must not be negative, got {seed}")
    return numpy.random.default_rng(seed).permutation(n)


def json_batches(name):
    with open(0 if name == "-" else name, "rb", closefd=name != "-") as f:
        regular = name != "-" and stat.S_ISREG(os.fstat(f.fileno()).st_mode)
        if regular and os.path.splitext(name)[1].lower() not in (".jsonl", ".ndjson"):
            data = f.read()
            try:
                value = json.loads(data.decode("utf-8"))
            except UnicodeDecodeError as e:
                raise Stop(1, f"rows '{name}' are not valid UTF-8: byte 0x{data[e.start]:02x} at offset {e.start}")
            except json.JSONDecodeError as e:
                raise Stop(1, f"rows '{name}:{e.lineno}' are not valid JSON: {e.msg} at column {e.colno}")
            except (ValueError, RecursionError) as e:
                raise Stop(1, f"rows '{name}' are not valid JSON: {oneline(e)}")
            values = value if isinstance(value, list) else [value]
            for i in range(0, len(values), BATCH_ROWS):
                part = values[i:i + BATCH_ROWS]
                yield "values", name, i, part, len(data) * len(part) // len(values)
            return
        items, weight, first = [], 0, 1
        for raw in f:
            items.append(raw)
            weight += len(raw)
            if len(items) == BATCH_ROWS or weight >= BATCH_BYTES:
                yield "lines", "stdin" if name == "-" else name, first, items, weight
                first += len(items)
                items, weight = [], 0
        if items:
            yield "lines", "stdin" if name == "-" else name, first, items, weight


def line_rows(place, raw):
    """The rows of one line. Rows also end where Python's splitlines ends a line, so a raw U+2028 cuts a row in two."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        message = f"not valid UTF-8: byte 0x{raw[e.start]:02x} at column {e.start + 1}"

        def bad():
            raise RowError(message)
        yield place, bad
        return
    pieces = [piece for piece in (line.strip() for line in text.splitlines()) if piece]
    for piece in pieces:
        yield place, lambda piece=piece: parse_line(piece, len(pieces) > 1)


def parse_line(text, cut):
    hint = "; the line is cut at a raw line separator (such as U+2028), which must be escaped" if cut else ""
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise RowError(f"not valid JSON: {e.msg} at column {e.colno}{hint}")
    except (ValueError, RecursionError) as e:
        raise RowError(f"not valid JSON: {oneline(e)}{hint}")


# ---------------------------------------------------------------------------------------------- row to messages

SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
            "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}


def kind(value):
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number",
            float: "a number", type(None): "null"}.get(type(value), type(value).__name__)


def normalise(row):
    """A row to (messages, tools or None), as the template shall see them."""
    if not isinstance(row, dict):
        raise RowError(f"the row is {kind(row)}, not an object")
    messages = row.get("messages")
    if messages is None and row.get("conversations") is not None:
        messages = from_sharegpt(row["conversations"])
    if not isinstance(messages, list):
        raise RowError("the row has no list 'messages' or 'conversations'")
    return [normalise_message(m, f"messages[{i}]") for i, m in enumerate(messages)], normalise_tools(row.get("tools"))


def from_sharegpt(turns):
    if not isinstance(turns, list):
        raise RowError(f"'conversations' is {kind(turns)}, not a list")
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise RowError(f"conversations[{i}] is {kind(turn)}, not an object")
        role = turn["from"] if "from" in turn else turn.get("role")
        if not isinstance(role, str) or role not in SHAREGPT:
            raise RowError(f"conversations[{i}] has the role {role!r}, which is none of {', '.join(SHAREGPT)}")
        content = turn["value"] if "value" in turn else turn.get("content", "")
        messages.append({"role": SHAREGPT[role], "content": content})
    return messages


def normalise_message(message, at):
    if not isinstance(message, dict):
        raise RowError(f"{at} is {kind(message)}, not an object")
    role, out = message.get("role"), dict(message)
    if role not in ("system", "user", "assistant", "tool"):
        raise RowError(f"{at} has the role {role!r}, which is none of system, user, assistant, tool")
    out["content"] = normalise_content(message.get("content"), at)
    if role == "assistant":
        if "reasoning_content" in message:
            reasoning = message["reasoning_content"]
            if reasoning is not None and not isinstance(reasoning, str):
                raise RowError(f"{at}.reasoning_content is {kind(reasoning)}, not a string")
            out["reasoning_content"] = reasoning or ""
        if "tool_calls" in message:
            calls = message["tool_calls"]
            if not isinstance(calls, list):
                raise RowError(f"{at}.tool_calls is {kind(calls)}, not a list")
            out["tool_calls"] = [normalise_call(c, i, f"{at}.tool_calls[{i}]") for i, c in enumerate(calls)]
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str) or not message["tool_call_id"]:
            raise RowError(f"{at} is a tool message without a 'tool_call_id'")
    return out


def normalise_content(content, at):
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        for text in texts:
            if not isinstance(text, str):
                raise RowError(f"{at}.content has a 'text' that is {kind(text)}, not a string")
        return " ".join(texts)
    return "" if content is None else str(content)


def normalise_call(call, index, at):
    if not isinstance(call, dict):
        raise RowError(f"{at} is {kind(call)}, not an object")
    out = dict(call)
    for key, default in (("id", f"call_{index}"), ("type", "function")):
        value = call.get(key)
        if value is not None and not isinstance(value, str):
            raise RowError(f"{at}.{key} is {kind(value)}, not a string")
        out[key] = value or default
    function = call.get("function")
    if not isinstance(function, dict):
        raise RowError(f"{at} has no object 'function'")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{at}.function has no 'name'")
    arguments = function.get("arguments")
    if arguments is None:
        raise RowError(f"{at}.function has no 'arguments'")
    out["function"] = dict(function)
    if not isinstance(arguments, str):
        out["function"]["arguments"] = json.dumps(arguments)
    return out


def normalise_tools(tools):
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as e:
            raise RowError(f"'tools' is a string but not JSON: {oneline(e)}")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RowError(f"'tools' is {kind(tools)}, not a list")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RowError(f"tools[{i}] is {kind(tool)}, not an object")
    return tools


# ---------------------------------------------------------------------------------------------- tokenizer

def load_tokenizer(settings):
    """The target's tokenizer with the effective chat template set and a pad token."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from transformers import AutoTokenizer, PreTrainedConfig
    except ImportError as e:
        raise Stop(3, f"the Python module 'transformers' cannot be loaded: {oneline(e)}")
    target = settings.target
    how = {"trust_remote_code": settings.trust_remote_code, "local_files_only": True}
    try:
        try:
            tok = AutoTokenizer.from_pretrained(target, **how)
        except AttributeError as e:               # a config that only its own class can complete
            if "max_position_embeddings" not in str(e):
                raise
            tok = AutoTokenizer.from_pretrained(target, config=PreTrainedConfig(max_position_embeddings=1), **how)
    except Exception as e:
        if not os.path.isdir(target) and isinstance(e, (OSError, ValueError)):
            raise Stop(1, f"target '{target}' is neither a directory nor in the local Hugging Face cache")
        raise Stop(1, f"target '{target}': its tokenizer cannot be loaded: {oneline(e)}")
    if settings.chat_template is not None:
        tok.chat_template = resolve_template(settings.chat_template)
    template = getattr(tok, "chat_template", None)
    if template is None:
        raise Stop(1, f"target '{target}' has no chat template; set recipe_args.chat_template")
    if isinstance(template, dict) and "default" not in template and len(template) == 0:
        raise Stop(1, f"target '{target}' has an empty list of chat templates; set recipe_args.chat_template")
    if tok.pad_token_id is None:
        tok.pad_token_id = 0
    return tok


def resolve_template(text):
    """An inline template, the text of a file (or its chat_template member), else the text itself."""
    if "{%" in text or "{{" in text or (text and not os.path.exists(text)):
        return text
    try:
        with open(text or ".", encoding="utf-8") as f:
            content = f.read()
    except OSError as e:
        raise Stop(3, f"cannot read chat template '{text}': {strerror(e)}")
    except UnicodeDecodeError as e:
        raise Stop(1, f"chat template '{text}' is not valid UTF-8: byte 0x{e.object[e.start]:02x} at offset {e.start}")
    try:
        inner = json.loads(content)["chat_template"]
    except (ValueError, KeyError, TypeError, IndexError):
        return content
    if not isinstance(inner, str):
        raise Stop(1, f"chat template '{text}': its 'chat_template' is {kind(inner)}, not a string")
    return inner


def template_sha256(template):
    if not isinstance(template, str):
        return NO_SHA256
    try:
        return hashlib.sha256(template.encode("utf-8")).hexdigest()
    except UnicodeEncodeError as e:
        raise Stop(1, f"the chat template cannot be written as UTF-8: {oneline(e)}")


def tokenizer_xxh3_128(target):
    import xxhash
    if not os.path.isdir(target):
        from huggingface_hub import try_to_load_from_cache
        found = [try_to_load_from_cache(target, name) for name in ("tokenizer_config.json", "tokenizer.json")]
        found = [os.path.dirname(path) for path in found if isinstance(path, str)]
        if not found:
            return ""
        target = found[0]
    names = [n for n in os.listdir(target) if any(fnmatch.fnmatchcase(n, p) for p in TOKENIZER_FILES)]
    digest = xxhash.xxh3_128()
    for name in sorted(map(os.fsencode, names)):
        path = os.path.join(os.fsencode(target), name)
        if not os.path.isfile(path):
            continue
        with open(path, "rb") as f:
            digest.update(name + b"\0" + struct.pack("<Q", os.fstat(f.fileno()).st_size))
            for block in iter(lambda: f.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


class Encoded:
    """A tokenised row: ids and mask within seq_length, `cut` tokens lost, `at` the first kept token, and its text."""

    def __init__(self, ids, mask, text, encoding, cut):
        self.ids, self.mask, self.text, self.encoding, self.cut = ids, mask, text, encoding, cut


class Encoder:
    """Rows to ids and masks with one tokenizer, template and seq_length."""

    def __init__(self, tok, settings):
        from jinja2.exceptions import TemplateError
        from transformers.utils import chat_template_utils
        self.tok, self.length = tok, settings.seq_length
        self.mask_reasoning, self.mask_prompt = settings.mask_reasoning, settings.mask_prompt
        self.left_cut = getattr(tok, "truncation_side", "right") == "left"
        self.left_pad = getattr(tok, "padding_side", "right") == "left"
        self.special, self.TemplateError = tok.special_tokens_map, TemplateError
        self.render_template = chat_template_utils.render_jinja_template
        template = tok.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template]
        for text in texts:
            self.compile(chat_template_utils, text)
        default = template.get("default", texts[0]) if isinstance(template, dict) else template
        self.by_generation = GENERATION.search(default) is not None
        if self.by_generation and not tok.is_fast:
            raise Stop(1, f"the tokenizer class '{type(tok).__name__}' does not tell where its tokens lie in the text, "
                       "which a template with {% generation %} needs")
        thinks = any("enable_thinking" in text for text in texts)
        self.prompt_modes = [{"enable_thinking": mode} for mode in (True, False)] if thinks else [{}]
        self.unfound_reasoning = 0
        self.encode("")                           # switches off padding and truncation that tokenizer.json may ask for

    def compile(self, utils, text):
        try:
            utils._compile_jinja_template(text)
        except self.TemplateError as e:
            line = getattr(e, "lineno", None)
            raise Stop(1, f"the chat template is not valid Jinja{f' (line {line})' if line else ''}: {oneline(e)}")

    def render(self, messages, tools, want_spans=False, **variables):
        """(text, spans of the generation blocks or None)"""
        system = [m for m in messages if m["role"] == "system"]
        if len(system) > 1:
            raise RowError("more than one system message")
        try:
            return self.render_once(messages, tools, want_spans, variables)
        except self.TemplateError as e:
            if not system or "System role not supported" not in str(e):
                raise
        return self.render_once(fold_system(messages, system[0]), tools, want_spans, variables)

    def render_once(self, messages, tools, want_spans, variables):
        if not messages:
            raise RowError("there is no message to render")
        texts, spans = self.render_template(
            conversations=[messages], tools=tools, chat_template=self.tok.get_chat_template(None, tools),
            return_assistant_tokens_mask=want_spans, **{**self.special, **variables})
        return texts[0], spans[0] if want_spans else None

    def encode(self, text):
        """(all ids of a text, the tokenizer's encoding or None)"""
        try:
            out = self.tok(text, add_special_tokens=False, verbose=False)
        except TypeError:
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise RowError("the text holds a lone surrogate, which is no character")
            raise
        return out["input_ids"], out.encodings[0] if out.encodings else None

    def ids(self, messages, tools, cut, **variables):
        found = self.encode(self.render(messages, tools, **variables)[0])[0]
        return self.window(found) if cut else found

    def window(self, ids):
        if len(ids) <= self.length:
            return ids
        return ids[-self.length:] if self.left_cut else ids[:self.length]

    def row(self, row):
        messages, tools = normalise(row)
        text, spans = self.render(messages, tools, self.by_generation)
        every, encoding = self.encode(text)
        ids = self.window(every)
        if encoding is not None and len(every) > self.length:
            encoding.truncate(self.length, stride=0, direction="left" if self.left_cut else "right")
        prefixes = {}
        if self.by_generation:
            mask = self.generation_mask(encoding, spans, len(ids))
        else:
            mask = self.prefix_mask(messages, tools, ids, prefixes)
        full = len(ids) >= self.length            # then turns are found in the untruncated text
        if self.mask_prompt:
            self.clear_prompts(mask, messages, tools, every, full, {} if full else prefixes)
        if self.mask_reasoning:
            self.clear_reasoning(mask, messages, tools, every, full)
        return Encoded(ids, mask, text, encoding, len(every) - len(ids))

    def generation_mask(self, encoding, spans, n):
        mask = [0] * n
        pads = self.length - n if self.left_pad else 0     # the rule below sees positions of the padded row
        for start, end in spans:
            first, last = encoding.char_to_token(start, 0), None
            if end < 1:
                raise RowError("the template has an empty {% generation %} block at the start of the text")
            last = encoding.char_to_token(end - 1, 0)
            if first is None:
                break
            stop = n if last is None or last + pads == 0 else last + 1
            mask[first:stop] = [1] * max(0, stop - first)
        return mask

    def prefix_mask(self, messages, tools, ids, prefixes):
        """Each assistant message is what it adds to the ids of the messages before it."""
        mask, lengths = [0] * len(ids), {len(messages): len(ids)}
        turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            raise RowError("there is no assistant message, and the template has no {% generation %} block")
        for k in turns:
            for edge in (k, k + 1):
                if edge not in lengths:
                    prefixes[edge] = self.ids(messages[:edge], tools, True)
                    lengths[edge] = self.prefix_length(prefixes[edge], ids, edge)
            start, end = (min(lengths[edge], len(ids)) for edge in (k, k + 1))
            mask[start:end] = [1] * max(0, end - start)
        return mask

    def prefix_length(self, prefix, ids, edge):
        n, eos = len(prefix), self.tok.eos_token_id
        same = prefix == ids[:n]
        if n <= len(ids) and not same and n > 1 and eos is not None:
            same = prefix[-1] == eos and prefix[:-1] == ids[:n - 1]
        if not same:
            raise RowError(f"the template renders the first {edge} messages alone differently from the start of the whole "
                           "row, so that the answers' tokens cannot be told; use a template with {% generation %} blocks")
        return n

    def offset(self, every):
        """Where the kept window starts in the untruncated ids."""
        return max(0, len(every) - self.length) if self.left_cut else 0

    def clear_prompts(self, mask, messages, tools, every, full, prefixes):
        """Clear what the template itself puts in front of an answer when it asks for one."""
        shift = self.offset(every)
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:          # nothing can be rendered before the first message
                continue
            base = prefixes.get(k)
            if base is None:
                base = self.ids(messages[:k], tools, not full)
            n = len(base)
            if base != every[:n]:
                continue
            longest = 0
            for mode in self.prompt_modes:
                prompt = self.ids(messages[:k], tools, not full, add_generation_prompt=True, **mode)
                if prompt[:n] == base and prompt[n:] == every[n:len(prompt)]:
                    longest = max(longest, len(prompt) - n)
            clear(mask, n - shift, n - shift + longest)

    def clear_reasoning(self, mask, messages, tools, every, full):
        """Clear what disappears from the ids when a turn's reasoning_content is emptied."""
        shift = self.offset(every)
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or not message.get("reasoning_content"):
                continue
            without = messages[:k] + [{**message, "reasoning_content": ""}] + messages[k + 1:]
            other = self.ids(without, tools, not full)
            head = common_prefix(every, other)
            tail = common_prefix(every[:head - 1 if head else None:-1], other[:head - 1 if head else None:-1])
            if head >= len(every) - tail:
                self.unfound_reasoning += 1
            else:
                clear(mask, head - shift, len(every) - tail - shift)


def fold_system(messages, system):
    """For templates without a system role: its text goes in front of the first user message."""
    out, folded = [], False
    for m in messages:
        if m["role"] == "user" and not folded:
            m, folded = {**m, "content": f"{system['content']}\n{m['content']}"}, True
        if m["role"] != "system":
            out.append(m)
    return out if folded else [{"role": "user", "content": system["content"]}] + out


def common_prefix(a, b):
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def clear(mask, start, end):
    start, end = max(0, start), min(len(mask), end)
    if start < end:
        mask[start:end] = [0] * (end - start)


# ---------------------------------------------------------------------------------------------- work

class Work:
    """What a worker process inherits: source, encoder, limit."""

    def __init__(self, source, encoder, least):
        self.source, self.encoder, self.least = source, encoder, least

    def batch(self, batch):
        """(ids, masks, lengths, bad rows as (place, why), counts) of a batch; ids and masks as bytes."""
        ids, masks, lengths, bad, counts = array.array("i"), bytearray(), [], [], collections.Counter()
        self.encoder.unfound_reasoning = 0
        for place, thunk in self.source.rows(batch):
            counts["rows"] += 1
            try:
                row = encode_row(self.encoder, thunk)
            except RowError as e:
                bad.append((place, str(e)))
                continue
            supervised = sum(row.mask)
            if supervised < self.least:
                counts["short"] += 1
                continue
            counts["cut"] += row.cut > 0
            counts["supervised"] += supervised
            counts["empty"] += not row.ids
            ids.extend(row.ids)
            masks += bytes(row.mask)
            lengths.append(len(row.ids))
        counts["unfound"] = self.encoder.unfound_reasoning
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes(), bytes(masks), lengths, bad, counts


def encode_row(encoder, thunk):
    """A row by its thunk; whatever goes wrong with it is a RowError."""
    try:
        return encoder.row(thunk())
    except (RowError, MemoryError):
        raise
    except encoder.TemplateError as e:
        raise RowError(f"the chat template fails: {oneline(e)}")
    except Exception as e:
        raise RowError(f"{type(e).__name__}: {oneline(e)}")
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # the tokenizer library's own crash
            raise
        raise RowError(f"the tokenizer fails: {oneline(e)}")


work = None                                       # set before workers fork


def worker_start(parent):
    for number_ in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)        # PR_SET_PDEATHSIG: never outlive the parent
    except (OSError, AttributeError):
        pass
    if os.getppid() != parent:
        os._exit(3)


def worker_batch(batch):
    return work.batch(batch)


def results(jobs):
    """Yield (batch weight, result) in data set order, with a bounded number of batches on the way."""
    batches = work.source.batches()
    head = [batch for _, batch in zip(range(2), batches)]
    if jobs == 1 or len(head) < 2:
        for queue in (head, batches):
            for batch in queue:
                yield batch[4], work.batch(batch)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), worker_start, (os.getpid(),))
    waiting = collections.deque()
    try:
        for queue in (head, batches):
            for batch in queue:
                waiting.append((batch[4], pool.submit(worker_batch, batch)))
                while len(waiting) > 3 * jobs or waiting and waiting[0][1].done():
                    weight, future = waiting.popleft()
                    yield weight, future.result()
        while waiting:
            weight, future = waiting.popleft()
            yield weight, future.result()
    except BrokenProcessPool:
        raise Stop(3, "a worker process was killed (out of memory?); try again with fewer jobs (-j)")
    finally:
        if waiting:                               # leaving early: the work under way is of no use
            for child in multiprocessing.active_children():
                child.kill()
        pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """A bar on a terminal, else a line a minute, on stderr."""

    def __init__(self, total, enabled):
        self.total, self.enabled, self.done, self.rows = total, enabled, 0, 0
        self.bar = enabled and os.isatty(2)
        self.start = self.last = time.monotonic()

    def add(self, weight, rows):
        self.done += weight
        self.rows += rows
        now = time.monotonic()
        if not self.enabled or now - self.last < (0.2 if self.bar else 60):
            return
        self.last, rate = now, self.rows / (now - self.start)
        text = f"{self.rows} rows, {rate:.0f} rows/s"
        if self.total and self.done:
            share = min(1.0, self.done / self.total)
            left = int((now - self.start) * (1 - share) / share)
            text += f", {share:.0%}, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
            if self.bar:
                text = f"[{'#' * int(24 * share):24}] {text}"
        if self.bar:
            os.write(2, f"\r\033[K{PROGRAM}: {text}".encode())
        else:
            say(text)

    def pause(self):
        """Make room for a message."""
        if self.bar:
            os.write(2, b"\r\033[K")


# ---------------------------------------------------------------------------------------------- output

class Output:
    """A file that appears under its name complete or not at all; a device or pipe is written as it is."""

    def __init__(self, path):
        self.path, self.temporary, self.fd = path, None, -1
        directory, name = os.path.split(path)
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                self.fd = os.open(path, os.O_WRONLY)
                return
            temporary = os.path.join(directory, f".{name}.tmp.{os.uname().nodename}.0.{os.getpid()}")
            for attempt in (0, 1):
                try:
                    self.fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                    break
                except FileExistsError:           # left by a dead process that had our number
                    if attempt:
                        raise
                    os.unlink(temporary)
            self.temporary = temporary
        except OSError as e:
            raise Stop(3, f"cannot write '{path}': {strerror(e)}")

    def write(self, data):
        data = memoryview(data)
        while data:
            data = data[os.write(self.fd, data):]

    def publish(self):
        if self.temporary:
            os.fsync(self.fd)
        os.close(self.fd)
        self.fd = -1
        if self.temporary:
            os.rename(self.temporary, self.path)
            self.temporary = None
            directory = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
            try:
                os.fsync(directory)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
            finally:
                os.close(directory)

    def discard(self):
        if self.temporary:
            try:
                os.unlink(self.temporary)
            except OSError:
                pass


def blocks(f):
    f.seek(0)
    return iter(lambda: f.read(1 << 20), b"")


def write_tokens(out, metadata, offsets, ids, masks):
    """Assemble the file. ids and masks are spill files, offsets an array; tensors lie in order of alignment."""
    import xxhash
    if sys.byteorder == "big":
        offsets.byteswap()
    offset_bytes = offsets.tobytes()
    digest = xxhash.xxh3_128()
    for f in (ids, masks):
        for block in blocks(f):
            digest.update(block)
    digest.update(offset_bytes)
    tokens, at, header = masks.tell(), 0, {"__metadata__": {**metadata, "rows_xxh3_128": digest.hexdigest()}}
    for name, dtype, n, size in (("row_offsets", "I64", len(offsets), 8), ("input_ids", "I32", tokens, 4),
                                 ("loss_mask", "U8", tokens, 1)):
        header[name] = {"dtype": dtype, "shape": [n], "data_offsets": [at, at + n * size]}
        at += n * size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    out.write(offset_bytes)
    for f in (ids, masks):
        for block in blocks(f):
            out.write(block)


def metadata_of(settings, tok):
    return {
        "format": "dspark-tokens", "version": "1", "seq_length": str(settings.seq_length),
        "pad_token_id": str(tok.pad_token_id), "chat_template_sha256": template_sha256(tok.chat_template),
        "train_data_path": str(settings.data), "train_split": json.dumps(settings.split),
        "shuffle_seed": str(settings.shuffle_seed), "mask_reasoning_content": json.dumps(settings.mask_reasoning),
        "mask_generation_prompt": json.dumps(settings.mask_prompt),
        "tokenizer_xxh3_128": tokenizer_xxh3_128(settings.target),
    }


def tokenize(opt, settings, tok, out):
    """Run all rows through the workers and write the file; the exit code."""
    quiet, skip = opt.get("quiet"), opt.get("skip-invalid")
    progress = Progress(work.source.total, not quiet)
    counts, bad, offsets = collections.Counter(), 0, array.array("q", [0])
    with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as masks:
        for weight, (some_ids, some_masks, lengths, some_bad, some_counts) in results(opt["jobs"]):
            counts.update(some_counts)
            bad += len(some_bad)
            if some_bad and not (skip and quiet):
                progress.pause()
                for place, why in some_bad:
                    say(f"{place}: {why}")
            if not bad or skip:
                ids.write(some_ids)
                masks.write(some_masks)
                for n in lengths:
                    offsets.append(offsets[-1] + n)
            progress.add(weight, some_counts["rows"])
        progress.pause()
        if bad and not skip:
            raise Stop(1, f"{bad} of {counts['rows']} rows are invalid; mend them or drop them with --skip-invalid")
        metadata = metadata_of(settings, tok)
        metadata["num_rows"] = str(len(offsets) - 1)
        write_tokens(out, metadata, offsets, ids, masks)
    out.publish()
    if quiet:
        return
    if counts["unfound"]:
        say(f"warning: the template does not show the reasoning_content of {counts['unfound']} turns; nothing was masked there")
    if counts["empty"]:
        say(f"warning: {counts['empty']} rows have no token at all")
    parts = [f"{len(offsets) - 1} rows", f"{offsets[-1]} tokens", f"{counts['supervised']} supervised",
             f"{counts['cut']} rows cut to {settings.seq_length}"]
    parts += [f"{bad} invalid rows dropped"] if skip else []
    parts += [f"{counts['short']} rows under {opt['min-loss-tokens']} supervised tokens dropped"] if opt["min-loss-tokens"] else []
    say(f"{opt['output']}: {', '.join(parts)}")


# ---------------------------------------------------------------------------------------------- show

def show(opt, encoder):
    place, thunk = work.source.find(opt["show"])
    try:
        row = encode_row(encoder, thunk)
    except RowError as e:
        raise Stop(1, f"{place}: {e}")
    runs = supervised_runs(row.mask)
    head = f"row {opt['show']} ({place}): {len(row.ids)} tokens, {sum(row.mask)} supervised in {len(runs)} runs"
    head += f", {row.cut} cut at seq_length {encoder.length}" if row.cut else ""
    opening, closing = ("\033[7m", "\033[27m") if os.isatty(1) else ("\u27e6", "\u27e7")
    text = "".join(opening + piece + closing if marked else piece for piece, marked in marked_text(encoder, row, runs))
    put(f"{head}\n{text}" + ("" if text.endswith("\n") else "\n"))


def supervised_runs(mask):
    edges = [i for i in range(len(mask) + 1) if (mask[i] if i < len(mask) else 0) != (mask[i - 1] if i else 0)]
    return list(zip(edges[::2], edges[1::2]))


def marked_text(encoder, row, runs):
    """Yield (piece of the kept text, supervised?), control characters made harmless."""
    at = 0
    if row.encoding is None:                      # no offsets: decode the tokens
        for start, end in runs + [(len(row.ids), len(row.ids))]:
            yield printable(encoder.tok.decode(row.ids[at:start])), False
            if start < end:
                yield printable(encoder.tok.decode(row.ids[start:end])), True
            at = end
        return
    places = row.encoding.offsets
    at, stop = (min(p[0] for p in places), max(p[1] for p in places)) if row.cut and places else (0, len(row.text))
    for start, end in runs:
        first, last = max(at, places[start][0]), max(p[1] for p in places[start:end])
        yield printable(row.text[at:first]), False
        yield printable(row.text[first:last]), True
        at = max(first, last)
    yield printable(row.text[at:stop]), False


def printable(text):
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)


# ---------------------------------------------------------------------------------------------- main

def on_signal(signum, frame):
    raise Signalled(signal.Signals(signum).name)


def prepare(opt):
    """Recipe, tokenizer and rows; sets `work`."""
    global work
    warn = (lambda message: None) if opt.get("quiet") else lambda message: say(f"warning: {message}")
    settings = Settings(read_recipe(opt["config"], opt["set"], warn))
    tok = load_tokenizer(settings)
    encoder = Encoder(tok, settings)
    operand = opt["rows"] is not None
    source = Source(opt["rows"] if operand else settings.data, settings.split, settings.shuffle_seed, operand)
    work = Work(source, encoder, opt["min-loss-tokens"])
    if opt.get("verbose"):
        say(f"tokenizer {type(tok).__name__}, {len(tok)} entries, pad {tok.pad_token_id}; loss mask from "
            + ("{% generation %} blocks" if encoder.by_generation else "conversation prefixes"))
    return settings, tok


def run(argv):
    opt = parse_args(argv)
    if "help" in opt:
        return put(help_text())
    if "version" in opt:
        return put(f"{PROGRAM} (dspark) {'unbuilt' if VERSION.startswith('@') else VERSION}\n")
    check_args(opt)
    if "show" in opt:
        prepare(opt)
        return show(opt, work.encoder)
    out = Output(opt["output"])
    try:
        settings, tok = prepare(opt)
        try:
            tokenize(opt, settings, tok, out)
        except OSError as e:
            raise Stop(3, f"cannot write '{opt['output']}': {strerror(e)}")
    finally:
        out.discard()


def main():
    warnings.simplefilter("ignore")
    for fd in (0, 1, 2):                          # a closed one must not become a data file
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_WRONLY if fd == 0 else os.O_RDONLY)   # its use fails, as it should
    for number_ in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number_) is not signal.SIG_IGN:
            signal.signal(number_, on_signal)
    code = 0
    try:
        run(sys.argv[1:])
    except Stop as e:
        say(e)
        code = e.code
        if code == 2:
            os.write(2, f"Try '{PROGRAM} --help' for more information\n".encode())
    except Signalled as e:
        say(f"stopped by {e}; nothing was written")
        code = 3
    except MemoryError:
        say("out of memory; try again with fewer jobs (-j)")
        code = 3
    except Exception as e:
        say(f"failed: {type(e).__name__}: {oneline(e)}")
        code = 3
    return code


if __name__ == "__main__":
    sys.exit(main())
