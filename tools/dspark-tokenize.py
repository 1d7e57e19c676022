#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""dspark-tokenize: chat rows to tokens.safetensors

A row is `ids` (the tokens that its rendered text gives, cut to seq_length, never padded) and `mask` (1: supervised):
  - with {% generation %} in the template: the blocks' character spans, turned into tokens;
  - otherwise: what each assistant message adds to the token ids of the messages before it;
  - then mask_generation_prompt and mask_reasoning_content clear bits.
One pass: rows stream through worker processes into two unlinked spill files (ids, masks), only row offsets stay in
memory; the output is assembled at the end because a safetensors header must know the lengths.
tokenizer_xxh3_128 is XXH3-128 over, for each tokenizer file (TOKENIZER_FILES) in byte order of the names: name, NUL,
size as 8 bytes little-endian, contents. The chat template is left to chat_template_sha256, which says NO_SHA256 where
the tokenizer has several named templates: no manifest can hold a hash of those.
"""
import array, ast, collections, contextlib, errno, fnmatch, getopt, hashlib, itertools, json, os, re
import multiprocessing, multiprocessing.connection, signal, stat, struct, sys, tempfile, time, warnings

PROGRAM, VERSION = "dspark-tokenize", "@VERSION@"
HELP = """\
usage: dspark-tokenize -c RECIPE [--set KEY=VALUE]... -o TOKENS [-j N] [--skip-invalid] [--min-loss-tokens N] [ROWS | -]
       dspark-tokenize -c RECIPE [--set KEY=VALUE]... --show ROW [ROWS | -]

  -c, --config RECIPE        the YAML recipe
      --set KEY=VALUE        override a key of the recipe; also spelt --recipe_args.KEY VALUE
  -o, --output TOKENS        the tokens.safetensors to write
  -j, --jobs N               worker processes (default: one per core); the output is the same for every N
      --skip-invalid         drop and count invalid rows instead of refusing them
      --min-loss-tokens N    drop and count rows with fewer than N supervised tokens
      --show ROW             print row ROW (from 0, in data set order) with its supervised tokens marked:
                             reverse video on a terminal, between \u27e6 and \u27e7 elsewhere
  -q, --quiet                no progress, summary or warnings
  -v, --verbose              say more
  -h, --help                 show this help
  -V, --version              show the version

ROWS replaces the recipe's train_data_path as the place where rows are read from (-: JSON Lines on standard input);
the path of the recipe is still what TOKENS records.
Exit status: 0 done, 1 refused, 2 usage, 3 failed (try again).
"""
SHORT = {"-c": "config", "-o": "output", "-j": "jobs", "-q": "quiet", "-v": "verbose", "-h": "help", "-V": "version"}
LONG = "config= set= output= jobs= skip-invalid min-loss-tokens= show= quiet verbose help version".split()
# recipe_args: first what dspark reads, then what a training recipe in the same file may hold
RECIPE_KEYS = """
    target_model_name_or_path train_data_path train_split seq_length micro_batch_size num_workers shuffle_seed
    trust_remote_code cache_output_dir cache_dtype cache_shard_size target_layer_ids draft_num_hidden_layers
    chat_template mask_reasoning_content mask_generation_prompt target_num_hidden_layers target_force_hf
    target_attn_implementation target_attn_backend target_dispatcher target_experts target_enable_fsdp_optimizations
    attention_backend aux_layer_ids block_size cached_target_path ce_loss_alpha ckpt_every_steps confidence_head_alpha
    confidence_head_stop_gradient confidence_head_with_markov cp_mode cp_zigzag draft_attn_implementation
    draft_gradient_checkpointing draft_vocab_size draft_weights_path fc_norm freeze_embeddings grad_accumulation_steps
    l1_loss_alpha lk_kl_decay lk_kl_scale lk_loss_type log_every_steps loss_decay_gamma markov_head_type markov_rank
    mask_token_id max_grad_norm multimodal norm_output num_anchors num_depths num_epochs output_dir
    packed_sequence_size parallel_drafting remote_max_retries remote_timeout remote_url remote_urls
    save_checkpoint_every_epoch selected_token_ids_path sglang_args shard_dense_target target_model_backend
    target_prefetch_depth train_shuffle ttt_steps val_data_path val_split vllm_args""".split()
SECTIONS = ("recipe_args", "dist_env", "distributed")
TOKENIZER_FILES = ("tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.model *.tiktoken "
                   "tokenization*.py").split()
NO_SHA256 = "not available: the template is not a string"
GENERATION = re.compile(r"\{%-?\s+generation\s+-?%\}")
SHAREGPT = {"system": "system", "human": "user", "user": "user",
            **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant")}
BATCH_ROWS, BLOCK = 64, 1 << 20
ABSENT = FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError    # inputs: the same tomorrow
work = None                                       # a Work, set before worker processes fork

class Stop(Exception): """Ends the program: an exit code (1 refused, 2 usage, 3 failed) and one sentence."""
class RowError(Exception): """What is wrong with one row."""
class Signalled(BaseException): """A signal that ends the program; not an Exception, lest it pass for a row's error."""

def why(e):
    """An exception as part of a sentence."""
    if isinstance(e, OSError) and e.errno: return os.strerror(e.errno).lower()
    if isinstance(e, UnicodeDecodeError):
        return f"not valid UTF-8: byte 0x{e.object[e.start]:02x} at offset {e.start}"
    if isinstance(e, json.JSONDecodeError):
        return f"not valid JSON: {e.msg} at " + (f"line {e.lineno} " if e.lineno > 1 else "") + f"column {e.colno}"
    mark, text = getattr(e, "problem_mark", None), " ".join(str(e).split())       # YAML's errors are long
    if mark: text = f"{e.problem or e.context} at line {mark.line + 1} column {mark.column + 1}"
    return (text if len(text) <= 300 else text[:300] + "...") or type(e).__name__

@contextlib.contextmanager
def guard(what, *refused):
    """Turns errors into Stop: of the kinds `refused` (and text that is no UTF-8) into 1, of the system into 3."""
    try: yield
    except (UnicodeError, *refused) as e: raise Stop(1, f"{what}: {why(e)}")
    except (OSError, ImportError) as e: raise Stop(3, f"{what}: {why(e)}")

def to_stderr(text):
    with contextlib.suppress(OSError):            # a stderr that is gone is no reason to stop
        os.write(2, text.encode("utf-8", "backslashreplace"))
def say(message): to_stderr(f"{PROGRAM}: {message}\n")
def put(text):
    """Write to stdout, where a failure counts."""
    with guard("cannot write standard output"): write_all(1, text.encode("utf-8", "backslashreplace"))
def write_all(fd, data):
    data = memoryview(data)
    while data: data = data[os.write(fd, data):]
def read_text(path, what):
    with guard(f"{what} '{path}'", *ABSENT), open(path, encoding="utf-8") as f: return f.read()

# ---------------------------------------------------------------------------------------------- command line
def parse_args(argv):
    """argv to a dict by long option name; 'set' is a list of (key, text), 'rows' the operand or None."""
    plain, overrides, opt, words = [], [], {}, collections.deque(argv)
    while words and words[0] != "--":             # the reference's spelling first: --a.b VALUE, --a.b=VALUE, --a.b
        word = words.popleft()
        name, eq, value = word[2:].partition("=")
        if word.startswith("--") and "." in name:
            if not eq: value = words.popleft() if words and not words[0].startswith("--") else "True"
            overrides.append((name, value))
        else: plain.append(word)
    try: found, operands = getopt.gnu_getopt(plain + list(words), "c:o:j:qvhV", LONG)
    except getopt.GetoptError as e: raise Stop(2, e.msg)
    for name, value in found:
        name = SHORT.get(name) or name[2:]
        if name == "set":
            key, eq, text = value.partition("=")
            if not key or not eq: raise Stop(2, f"--set wants KEY=VALUE, not '{value}'")
            overrides.append((key, text))
        opt[name] = value
    if len(operands) > 1: raise Stop(2, f"one ROWS operand at most, not also '{operands[1]}'")
    return {**opt, "set": overrides, "rows": operands[0] if operands else None}

def check_args(opt):
    def count(name, least, default):
        text = opt.get(name, str(default))
        if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or int(text) < least:
            raise Stop(2, f"--{name} wants an integer of at least {least}, not '{text}'")
        return int(text)
    if "config" not in opt: raise Stop(2, "a recipe is needed (-c RECIPE)")
    for name in ("output", "jobs", "skip-invalid", "min-loss-tokens"):
        if "show" in opt and name in opt: raise Stop(2, f"--{name} has no meaning with --show")
    if "show" not in opt and not opt.get("output"):
        raise Stop(2, "an output file is needed (-o TOKENS), or --show ROW")
    numbers = {"show": (0, 0), "jobs": (1, len(os.sched_getaffinity(0))), "min-loss-tokens": (0, 0)}
    opt.update({name: count(name, *limits) for name, limits in numbers.items() if name in opt or name != "show"})
    if opt["rows"] == "-" and os.isatty(0):
        raise Stop(2, "standard input is a terminal; rows are read from a file or a pipe")

# ---------------------------------------------------------------------------------------------- recipe
def literal(text):
    """The Python-like literal that a string may be, else the string."""
    words = {"none": None, "true": True, "false": False}
    if text in words or len(text) > 1000: return words.get(text, text)
    try: return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError): return text

def expand(text):
    """Replace ${VAR}, ${VAR,default}, ${oc.env:VAR,default}, then $VAR."""
    def env(name, default):
        if name not in os.environ and default is None:
            raise Stop(1, f"recipe: environment variable '{name}' is not set; set it or write ${{{name},default}}")
        return os.environ.get(name, default)
    def braced(match):
        name, comma, default = re.sub(r"^oc\.env:", "", match[1].strip()).partition(",")
        return env(name.strip(), default.strip() if comma else None)
    text = re.sub(r"\$\{([^}]+)\}", braced, text)
    return re.sub(r"\$([A-Za-z_]\w*(?:\.\w+)*)", lambda m: env(m[1], None), text, flags=re.ASCII)
def resolve(node):
    if isinstance(node, dict): return {key: resolve(value) for key, value in node.items()}
    if isinstance(node, list): return [resolve(value) for value in node]
    return literal(expand(node)) if isinstance(node, str) else node
def nearest(key):
    import difflib
    found = difflib.get_close_matches(str(key), RECIPE_KEYS, 1)
    return f"; did you mean '{found[0]}'?" if found else ""

def override(doc, key, text):
    section, *path = key.split(".")
    if not path or "" in path or (section not in SECTIONS and section not in doc):
        raise Stop(2, f"unknown recipe key '{key}'; keys look like 'recipe_args.seq_length'")
    if section == "recipe_args" and path[0] not in RECIPE_KEYS:
        raise Stop(2, f"unknown recipe key '{key}'{nearest(path[0])}")
    for part in [section] + path[:-1]:
        if not isinstance(doc.get(part), dict): doc[part] = {}
        doc = doc[part]
    doc[path[-1]] = resolve(literal(text))

def read_recipe(path, overrides, warn):
    """recipe_args with overrides applied and strings expanded and typed."""
    with guard("the Python module 'yaml' cannot be loaded"): import yaml
    text = read_text(path, "recipe")
    with guard(f"recipe '{path}' is not valid YAML", yaml.YAMLError, ValueError, RecursionError):
        doc = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    doc = resolve(doc) if isinstance(doc, dict) else {}
    for key, value in overrides: override(doc, key, value)
    args = doc.get("recipe_args")
    if not isinstance(args, dict): raise Stop(1, f"recipe '{path}' has no 'recipe_args' section")
    for key in args:
        if key not in RECIPE_KEYS: warn(f"recipe '{path}': unknown key 'recipe_args.{key}'{nearest(key)}")
    return args

def integer(v): return isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < 1 << 62 and v == int(v)
def string(v): return isinstance(v, str)
def flag(v): return v in (False, True)
def positive(v): return integer(v) and v >= 1
def paths(v): return string(v) or isinstance(v, (list, tuple)) and v and all(map(string, v))
class Settings:
    """The keys of recipe_args that decide rows, checked. An empty value is an absent one; ...: must be there."""
    KEYS = {"target_model_name_or_path": (..., string, "a string"), "train_data_path": (..., paths, "a path or paths"),
            "seq_length": (..., positive, "an integer of at least 1"), "shuffle_seed": (42, integer, "an integer"),
            "train_split": (None, string, "a string"), "chat_template": (None, lambda v: True, ""),
            **dict.fromkeys(("trust_remote_code", "mask_reasoning_content", "mask_generation_prompt"),
                            (False, flag, "true or false"))}
    def __init__(self, args):
        for key, (default, good, what) in self.KEYS.items():
            value = default if args.get(key) is None else args[key]
            if value is ...: raise Stop(1, f"recipe: recipe_args.{key} is missing")
            if value is not default and not good(value):
                raise Stop(1, f"recipe: recipe_args.{key} must be {what}, not {value!r}")
            setattr(self, key, bool(value) if good is flag else int(value) if good in (integer, positive) else value)

# ---------------------------------------------------------------------------------------------- rows
class Source:
    """Where rows come from. A batch is (kind, name, first, items, weight); kinds:
    lines: raw lines of a JSON Lines file, counted from 1; values: parsed rows, counted from 0; index: row numbers of
    self.dataset. Weights add up to self.total (bytes or rows; 0: not known)."""
    def __init__(self, path, split, seed, stdin):
        self.files, self.dataset, self.total, self.stdin = [path] if string(path) else list(path), None, 0, stdin
        if isinstance(path, str) and not stdin:
            directory = os.path.isdir(path) and any(is_parquet(name) for name in os.listdir(path))
            if directory or is_parquet(path) and os.path.isfile(path) or is_hub_id(path):
                return self.load(path, split, seed, directory)
        for name in [] if stdin else self.files:
            with guard(f"rows '{name}'", *ABSENT): info = os.stat(name)
            if stat.S_ISDIR(info.st_mode) or is_parquet(name):
                raise Stop(1, f"rows '{name}': not JSON; for Parquet name one file, or one directory that holds some")
            self.total += info.st_size
    def load(self, path, split, seed, directory):
        """Parquet and hub data: the whole split is shuffled, then sliced; slices of another spelling come first."""
        with guard(f"rows '{path}' need the Python module 'datasets'"): import datasets
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        part = re.match(r"^(\w+)\[(\d*):(\d*)\]$", split or "")
        base, local = part[1] if part else split or "train", directory or os.path.exists(path)
        where, name = (os.path.abspath(path) if directory else path), None
        if local and not directory: where, name = os.path.split(os.path.abspath(path))
        what = f"rows '{path}'" + ("" if local else " (no such file, and as a hub data set)")
        with guard(what, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError):   # an unknown split too
            self.dataset = datasets.load_dataset(where, split=base, data_files=name,
                                                 verification_mode=datasets.VerificationMode.NO_CHECKS)
            order = shuffled(len(self.dataset), seed)
        self.order = order[slice(*(int(edge) if edge else None for edge in part.groups()[1:]))] if part else order
        self.total = len(self.order)
    def batches(self):
        if self.dataset is not None:
            for i in range(0, self.total, BATCH_ROWS):
                chunk = [int(k) for k in self.order[i:i + BATCH_ROWS]]
                yield "index", self.files[0], 0, chunk, len(chunk)
            return
        for name in self.files:
            shown = "stdin" if self.stdin else name
            with guard(f"rows '{shown}'", *ABSENT), open(0 if self.stdin else name, "rb", closefd=not self.stdin) as f:
                stream = self.stdin or not stat.S_ISREG(os.fstat(f.fileno()).st_mode)
                lines = stream or os.path.splitext(name)[1].lower() in (".jsonl", ".ndjson")
                yield from line_batches(f, shown) if lines else value_batches(f, shown)
    def rows(self, batch):
        """Yield (place, thunk) for each row of a batch; the thunk gives the row or raises what is wrong with it."""
        kind, name, first, items, _ = batch
        columns = self.dataset[items] if kind == "index" else None
        for i, item in enumerate(items):
            if kind == "lines": yield from line_rows(f"{name}:{first + i}", item)
            elif kind == "values": yield f"{name}[{first + i}]", lambda item=item: item
            else: yield f"{name}[{item}]", lambda i=i: {key: column[i] for key, column in columns.items()}
    def find(self, wanted):
        """(place, thunk) of one row by its number in data set order."""
        count = 0
        for batch in self.batches():
            skip = len(batch[3]) if batch[0] == "index" and count + len(batch[3]) <= wanted else 0
            for row in () if skip else self.rows(batch):
                if count == wanted: return row
                count += 1
            count += skip
        raise Stop(1, f"there is no row {wanted}: the data has {count} rows, counted from 0")
def shuffled(n, seed):
    import numpy
    return numpy.random.default_rng(seed).permutation(n)     # the order that `datasets` draws, without its cache files
def is_parquet(path): return path.lower().endswith(".parquet")
def is_hub_id(path):
    """owner/name that is no local path and does not look like a file of rows."""
    return (re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None and not os.path.exists(path)
            and not os.path.isdir(path.split("/")[0])
            and os.path.splitext(path)[1].lower() not in (".json", ".jsonl", ".ndjson", ".parquet", ".txt"))
def line_batches(f, name):
    for first in itertools.count(1, BATCH_ROWS):
        items = list(itertools.islice(f, BATCH_ROWS))
        if not items: return
        yield "lines", name, first, items, sum(map(len, items))
def value_batches(f, name):
    data = f.read()
    with guard(f"rows '{name}'", ValueError, RecursionError): value = json.loads(data.decode("utf-8"))
    values = value if isinstance(value, list) else [value]
    for i in range(0, len(values), BATCH_ROWS):
        part = values[i:i + BATCH_ROWS]
        yield "values", name, i, part, len(data) * len(part) // len(values)
def line_rows(place, raw):
    """The rows of one line. A row ends where str.splitlines ends a line, so a raw U+2028 cuts it in two."""
    pieces = [raw]
    with contextlib.suppress(UnicodeDecodeError):
        pieces = [piece for piece in (line.strip() for line in raw.decode("utf-8").splitlines()) if piece]
    for piece in pieces:
        cut = " (a line cut at a raw line separator, such as U+2028)" if len(pieces) > 1 else ""
        yield place + cut, lambda piece=piece: json.loads(piece if isinstance(piece, str) else piece.decode("utf-8"))

# ---------------------------------------------------------------------------------------------- row to messages
def need(good, message):
    if not good: raise RowError(message)
def need_type(value, wanted, what):
    if not isinstance(value, wanted):
        names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        raise RowError(f"{what} is {names.get(type(value)) or type(value).__name__}, not {names[wanted]}")

def normalise(row):
    """A row to (messages, tools or None), as the template shall see them."""
    need_type(row, dict, "the row")
    messages, tools = row.get("messages"), row.get("tools")
    if messages is None and row.get("conversations") is not None:
        need_type(row["conversations"], list, "'conversations'")
        messages = [from_sharegpt(turn, f"conversations[{i}]") for i, turn in enumerate(row["conversations"])]
    need(isinstance(messages, list), "the row has no list 'messages' or 'conversations'")
    messages = [normalise_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if isinstance(tools, str):
        try: tools = json.loads(tools)
        except (ValueError, RecursionError) as e: raise RowError(f"'tools' is a string but {why(e)}")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()): need_type(tool, dict, f"tools[{i}]")
    need(tools is None or isinstance(tools, list), "'tools' is not a list")
    return messages, tools or None
def from_sharegpt(turn, at):
    need_type(turn, dict, at)
    role = turn["from"] if "from" in turn else turn.get("role")
    need(isinstance(role, str) and role in SHAREGPT, f"{at} has the role {role!r}, not one of {', '.join(SHAREGPT)}")
    return {"role": SHAREGPT[role], "content": turn["value"] if "value" in turn else turn.get("content", "")}

def normalise_message(message, at):
    need_type(message, dict, at)
    role, out = message.get("role"), dict(message)
    need(role in ("system", "user", "assistant", "tool"),
         f"{at} has the role {role!r}, not one of system, user, assistant, tool")
    out["content"] = normalise_content(message.get("content"), at)
    if role == "assistant" and "reasoning_content" in message:
        out["reasoning_content"] = "" if message["reasoning_content"] is None else message["reasoning_content"]
        need_type(out["reasoning_content"], str, f"{at}.reasoning_content")
    if role == "assistant" and "tool_calls" in message:
        need_type(message["tool_calls"], list, f"{at}.tool_calls")
        out["tool_calls"] = [normalise_call(c, i, f"{at}.tool_calls[{i}]") for i, c in enumerate(message["tool_calls"])]
    if role == "tool":
        call = message.get("tool_call_id")
        need(isinstance(call, str) and call, f"{at} is a tool message without a 'tool_call_id'")
    return out
def normalise_content(content, at):
    if isinstance(content, list):
        content = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        for text in content: need_type(text, str, f"{at}.content: a 'text'")
        return " ".join(content)
    return "" if content is None else str(content)

def normalise_call(call, index, at):
    need_type(call, dict, at)
    out, function = dict(call), call.get("function")
    for key, default in (("id", f"call_{index}"), ("type", "function")):
        out[key] = default if call.get(key) is None else call[key]
        need_type(out[key], str, f"{at}.{key}")
        out[key] = out[key] or default
    need_type(function, dict, f"{at}.function")
    need(isinstance(function.get("name"), str) and function["name"], f"{at}.function has no 'name'")
    need(function.get("arguments") is not None, f"{at}.function has no 'arguments'")
    arguments = function["arguments"]
    out["function"] = {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return out

# ---------------------------------------------------------------------------------------------- tokenizer
def load_tokenizer(settings):
    """The target's tokenizer with the effective chat template set and a pad token."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error", HF_HUB_VERBOSITY="error",
                      USE_TORCH="0")
    sys.modules.setdefault("torch", None)         # where it is installed it would only cost seconds; see prepare
    with guard("the Python module 'transformers' cannot be loaded"):
        from transformers import AutoTokenizer, PreTrainedConfig
    target = settings.target_model_name_or_path
    how = {"trust_remote_code": settings.trust_remote_code, "local_files_only": True}
    for last in (False, True):
        try:
            tok = AutoTokenizer.from_pretrained(target, **how)
            break
        except Exception as e:
            how["config"] = PreTrainedConfig(max_position_embeddings=1)   # for one that only its class completes
            if not last and isinstance(e, AttributeError) and "max_position_embeddings" in str(e): continue
            raise Stop(1, f"target '{target}': its tokenizer cannot be loaded: {why(e)}" if os.path.isdir(target) else
                       f"target '{target}' is neither a directory nor in the local Hugging Face cache; download it")
    if len(tok.get_added_vocab()) >= len(tok): raise Stop(1, f"target '{target}': the tokenizer has no vocabulary file")
    if settings.chat_template is not None: tok.chat_template = resolve_template(str(settings.chat_template))
    if not isinstance(getattr(tok, "chat_template", None), str) and not tok.chat_template:
        raise Stop(1, f"target '{target}' has no chat template; set recipe_args.chat_template")
    if tok.pad_token_id is None: tok.pad_token_id = 0
    return tok

def resolve_template(text):
    """An inline template, the text of a file (or its chat_template member), else the text itself."""
    if "{%" in text or "{{" in text or (text and not os.path.exists(text)): return text
    content = read_text(text or ".", "chat template")
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        content = json.loads(content)["chat_template"]
    if not isinstance(content, str): raise Stop(1, f"chat template '{text}': its 'chat_template' is not a string")
    return content

def tokenizer_xxh3_128(target):
    import xxhash
    if not os.path.isdir(target):
        from huggingface_hub import try_to_load_from_cache
        found = [try_to_load_from_cache(target, name) for name in ("tokenizer_config.json", "tokenizer.json")]
        target = next((os.path.dirname(path) for path in found if isinstance(path, str)), None)
        if target is None: return ""
    digest = xxhash.xxh3_128()
    names = [name for name in os.listdir(target) if any(fnmatch.fnmatchcase(name, p) for p in TOKENIZER_FILES)]
    for name in sorted(map(os.fsencode, names)):
        path = os.path.join(os.fsencode(target), name)
        if not os.path.isfile(path): continue
        digest.update(name + b"\0" + struct.pack("<Q", os.path.getsize(path)))
        with guard(f"target '{target}', {os.fsdecode(name)}", *ABSENT), open(path, "rb") as f:
            for block in blocks(f): digest.update(block)
    return digest.hexdigest()

# ids and mask within seq_length, the whole text, the tokenizer's encoding (None: no offsets), how many tokens were cut
Encoded = collections.namedtuple("Encoded", "ids mask text encoding cut")

class Encoder:
    """Rows to ids and masks with one tokenizer, template and seq_length."""
    def __init__(self, tok, settings):
        from jinja2.exceptions import TemplateError
        from transformers.utils import chat_template_utils
        self.tok, self.settings, self.length, self.TemplateError = tok, settings, settings.seq_length, TemplateError
        self.left_cut = getattr(tok, "truncation_side", "right") == "left"
        self.left_pad = getattr(tok, "padding_side", "right") == "left"
        self.special, self.unfound_reasoning = tok.special_tokens_map, 0
        self.render_template = chat_template_utils.render_jinja_template
        texts = tok.chat_template if isinstance(tok.chat_template, dict) else {"default": tok.chat_template}
        with guard("the chat template is not valid", TemplateError):
            for text in texts.values(): chat_template_utils._compile_jinja_template(text)      # cached for rendering
        self.by_generation = GENERATION.search(texts.get("default", next(iter(texts.values())))) is not None
        if self.by_generation and not tok.is_fast:
            raise Stop(1, f"the tokenizer class '{type(tok).__name__}' does not tell where its tokens lie in the text, "
                       "which a template with {% generation %} needs; use another template")
        thinks = any("enable_thinking" in text for text in texts.values())
        self.prompt_modes = [{"enable_thinking": mode} for mode in (True, False)] if thinks else [{}]
    def render(self, messages, tools, want_spans=False, **variables):
        """(text, spans of the generation blocks or None)"""
        system = [m for m in messages if m["role"] == "system"]
        need(len(system) < 2, "more than one system message")
        need(messages, "there is no message to render")
        def once(messages):
            texts, spans = self.render_template(
                conversations=[messages], tools=tools, chat_template=self.tok.get_chat_template(None, tools),
                return_assistant_tokens_mask=want_spans, **{**self.special, **variables})
            return texts[0], spans[0] if want_spans else None
        try: return once(messages)
        except self.TemplateError as e:
            if not system or "System role not supported" not in str(e): raise
        return once(fold_system(messages, system[0]["content"]))
    def encode(self, text):
        """(all ids of a text, the tokenizer's encoding or None)"""
        try: out = self.tok(text, add_special_tokens=False, verbose=False)
        except TypeError:
            need(not re.search("[\ud800-\udfff]", text), "the text holds a lone surrogate, which is no character")
            raise
        return out["input_ids"], out.encodings[0] if out.encodings else None
    def ids(self, messages, tools, cut, **variables):
        found = self.encode(self.render(messages, tools, **variables)[0])[0]
        return self.window(found) if cut else found
    def window(self, ids):
        return ids if len(ids) <= self.length else ids[-self.length:] if self.left_cut else ids[:self.length]
    def row(self, row):
        messages, tools = normalise(row)
        text, spans = self.render(messages, tools, self.by_generation)
        every, encoding = self.encode(text)
        ids, prefixes = self.window(every), {}
        need(ids, "the template renders it as no token at all")
        if encoding is not None and len(ids) < len(every):
            encoding.truncate(self.length, stride=0, direction="left" if self.left_cut else "right")
        if self.by_generation: mask = self.generation_mask(encoding, spans, len(ids))
        else: mask = self.prefix_mask(messages, tools, ids, prefixes)
        full = len(ids) >= self.length            # then turns are looked for in the untruncated ids,
        shift = len(every) - len(ids) if self.left_cut else 0      # in which the kept ones start here
        if self.settings.mask_generation_prompt:
            self.clear_prompts(mask, messages, tools, every, full, shift, {} if full else prefixes)
        if self.settings.mask_reasoning_content: self.clear_reasoning(mask, messages, tools, every, full, shift)
        return Encoded(ids, mask, text, encoding, len(every) - len(ids))
    def generation_mask(self, encoding, spans, n):
        mask = [0] * n
        pads = self.length - n if self.left_pad else 0     # the rule about token 0 means the padded row
        for start, end in spans:
            need(end > 0, "the template has an empty {% generation %} block at the start of the text")
            first, last = encoding.char_to_token(start, 0), encoding.char_to_token(end - 1, 0)
            if first is None: break
            fill(mask, first, n if last is None or last + pads == 0 else last + 1, 1)
        return mask
    def prefix_mask(self, messages, tools, ids, prefixes):
        """Each assistant message is what it adds to the ids of the messages before it."""
        mask, lengths, eos = [0] * len(ids), {len(messages): len(ids)}, self.tok.eos_token_id
        turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        need(turns, "there is no assistant message, and the template has no {% generation %} block")
        for edge in itertools.chain(*((k, k + 1) for k in turns)):
            if edge in lengths: continue
            prefix = prefixes[edge] = self.ids(messages[:edge], tools, True)
            n = lengths[edge] = len(prefix)
            closed = 1 < n <= len(ids) and eos is not None and prefix[-1] == eos   # an end that the last message has
            need(prefix == ids[:n] or closed and prefix[:-1] == ids[:n - 1],
                 f"the template renders the first {edge} messages alone differently from the start of the whole row, "
                 "which hides where answers lie; use a template with {% generation %} blocks")
        for k in turns: fill(mask, lengths[k], lengths[k + 1], 1)
        return mask
    def clear_prompts(self, mask, messages, tools, every, full, shift, prefixes):
        """Clear what the template itself puts in front of an answer when it asks for one."""
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0: continue   # nothing can be rendered before the first message
            base = prefixes[k] if k in prefixes else self.ids(messages[:k], tools, not full)
            n, longest = len(base), 0
            for mode in self.prompt_modes if base == every[:n] else ():
                prompt = self.ids(messages[:k], tools, not full, add_generation_prompt=True, **mode)
                if prompt[:n] == base and prompt[n:] == every[n:len(prompt)]: longest = max(longest, len(prompt) - n)
            fill(mask, n - shift, n - shift + longest, 0)
    def clear_reasoning(self, mask, messages, tools, every, full, shift):
        """Clear what disappears from the ids when a turn's reasoning_content is emptied."""
        for k, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("reasoning_content"):
                without = messages[:k] + [{**message, "reasoning_content": ""}] + messages[k + 1:]
                other = self.ids(without, tools, not full)
                head = common_prefix(every, other)
                end = len(every) - common_prefix(every[head:][::-1], other[head:][::-1])
                self.unfound_reasoning += head >= end
                fill(mask, head - shift, end - shift, 0)
def fold_system(messages, text):
    """For templates without a system role: its text goes in front of the first user message."""
    out = [m for m in messages if m["role"] != "system"]
    for i, m in enumerate(out):
        if m["role"] == "user":
            out[i] = {**m, "content": f"{text}\n{m['content']}"}
            return out
    return [{"role": "user", "content": text}] + out
def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
def fill(mask, start, end, value):
    start, end = max(0, start), min(len(mask), end)
    mask[start:max(start, end)] = [value] * (end - start)

# ---------------------------------------------------------------------------------------------- work
Work = collections.namedtuple("Work", "source encoder least")     # what worker processes inherit

def run_batch(batch):
    """(ids, masks, lengths, bad rows as (place, why), counts) of a batch; ids and masks as bytes."""
    import numpy
    ids, masks, lengths, bad, counts = [], bytearray(), [], [], collections.Counter()
    work.encoder.unfound_reasoning = 0
    for place, thunk in work.source.rows(batch):
        counts["rows"] += 1
        try: row = encode_row(thunk)
        except RowError as e:
            bad.append((place, str(e)))
            continue
        supervised = sum(row.mask)
        if supervised < work.least:
            counts["short"] += 1
            continue
        counts.update(cut=row.cut > 0, supervised=supervised)
        ids += row.ids
        masks += bytes(row.mask)
        lengths.append(len(row.ids))
    counts["unfound"] = work.encoder.unfound_reasoning
    return numpy.asarray(ids, "<i4").tobytes(), bytes(masks), lengths, bad, counts

def encode_row(thunk):
    """A row by its thunk; whatever goes wrong with it is a RowError."""
    try: return work.encoder.row(thunk())
    except (RowError, json.JSONDecodeError, UnicodeDecodeError) as e: raise RowError(why(e))
    except MemoryError: raise
    except work.encoder.TemplateError as e: raise RowError(f"the chat template fails: {why(e)}")
    except BaseException as e:                    # PanicException: the tokenizer library's own crash
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException": raise
        raise RowError(f"{type(e).__name__}: {why(e)}")

def worker(pipe, parent):
    """The life of a worker process: batches in, results or a Stop out."""
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):  # the parent decides about what a terminal sends to all
        signal.signal(getattr(signal, name), signal.SIG_IGN if name == "SIGINT" else signal.SIG_DFL)
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)        # PR_SET_PDEATHSIG: never outlive the parent
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            batch = pipe.recv()
            try: result = run_batch(batch)
            except Exception as e: result = e if isinstance(e, Stop) else Stop(3, f"{type(e).__name__}: {why(e)}")
            pipe.send(result)
def start_worker():
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=worker, args=(theirs, os.getpid()), daemon=True).start()
    theirs.close()                                # so that a worker's death is an end of file here
    return ours

def results(jobs):
    """Yield (weight, result) of each batch in data set order, with a bounded number of batches on the way."""
    batches = work.source.batches()
    head = [batch for _, batch in zip(range(2), batches)]
    if jobs == 1 or len(head) < 2:
        for batch in itertools.chain(head, batches): yield batch[4], run_batch(batch)
        return
    with guard("cannot start a worker process"): idle = [start_worker() for _ in range(jobs)]
    slots = collections.deque()                   # [weight, pipe of the worker that has it or None, result] in order
    for batch in itertools.chain(head, batches, [None]):
        while slots and (batch is None or not idle or len(slots) >= 4 * jobs or slots[0][1] is None):
            ready = multiprocessing.connection.wait([slot[1] for slot in slots if slot[1]]) if slots[0][1] else ()
            for slot in [slot for slot in slots if slot[1] in ready]:
                slot[2] = receive(slot[1])
                idle.append(slot[1])
                slot[1] = None
            if slots[0][1] is None: yield slots[0][0], slots.popleft()[2]
        if batch:
            slots.append([batch[4], idle.pop(), None])
            with contextlib.suppress(OSError): slots[-1][1].send(batch)   # a dead worker shows when it is waited for
def receive(pipe):
    result = None
    with contextlib.suppress(EOFError, OSError): result = pipe.recv()
    if result is None: raise Stop(3, "a worker process was killed (out of memory?); try again with fewer jobs (-j)")
    if isinstance(result, Stop): raise result
    return result

class Progress:
    """A bar on a terminal, else a line a minute, on stderr."""
    def __init__(self, total, enabled):
        self.total, self.enabled, self.bar, self.done, self.rows = total, enabled, enabled and os.isatty(2), 0, 0
        self.start = self.last = time.monotonic()
    def add(self, weight, rows):
        self.done, self.rows, now = self.done + weight, self.rows + rows, time.monotonic()
        if not self.enabled or now - self.last < (0.2 if self.bar else 60): return
        self.last, spent, share = now, now - self.start, min(1.0, self.done / self.total) if self.total else 0
        text, left = f"{self.rows} rows, {self.rows / spent:.0f} rows/s", int(spent / share - spent) if share else 0
        text += f", {share:.0%}, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left" if share else ""
        self.clear()
        to_stderr(f"{PROGRAM}: [{'#' * int(24 * share):24}] {text}" if self.bar else f"{PROGRAM}: {text}\n")
    def clear(self): to_stderr("\r\033[K" if self.bar else "")

# ---------------------------------------------------------------------------------------------- output
@contextlib.contextmanager
def output(path):
    """The descriptor of a file that appears complete or not at all; a device or pipe is written as it is."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.tmp.{os.uname().nodename}.0.{os.getpid()}")
    device = os.path.exists(path) and not os.path.isfile(path)
    with guard(f"cannot write '{path}'"), contextlib.ExitStack() as stack:
        if not device:
            stack.callback(remove, temporary)
            remove(temporary)                     # left by a dead process that had our number
        fd = os.open(path if device else temporary, os.O_WRONLY | (0 if device else os.O_CREAT | os.O_EXCL), 0o666)
        yield fd
        if not device: os.fsync(fd)
        os.close(fd)
        if device: return
        os.rename(temporary, path)
        try: os.fsync(os.open(directory or ".", os.O_RDONLY))
        except OSError as e:
            if e.errno != errno.EINVAL: raise
def remove(path):
    with contextlib.suppress(OSError): os.unlink(path)
def blocks(f):
    f.seek(0)
    return iter(lambda: f.read(BLOCK), b"")

def write_tokens(fd, metadata, offsets, ids, masks):
    """Assemble the file. ids and masks are spill files, offsets an array; tensors lie in order of alignment."""
    import numpy, xxhash
    tokens, rows, digest = offsets[-1], len(offsets), xxhash.xxh3_128()
    offsets = numpy.asarray(offsets).astype("<i8").tobytes()
    for block in itertools.chain(blocks(ids), blocks(masks), [offsets]): digest.update(block)
    at, header = 0, {"__metadata__": {**metadata, "num_rows": str(rows - 1), "rows_xxh3_128": digest.hexdigest()}}
    for name, dtype, n, size in (("row_offsets", "I64", rows, 8), ("input_ids", "I32", tokens, 4),
                                 ("loss_mask", "U8", tokens, 1)):
        header[name] = {"dtype": dtype, "shape": [n], "data_offsets": [at, at + n * size]}
        at += n * size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    for block in itertools.chain([struct.pack("<Q", len(text)) + text, offsets], blocks(ids), blocks(masks)):
        write_all(fd, block)
def metadata_of(settings, tok):
    with guard("the chat template"): template = string(tok.chat_template) and tok.chat_template.encode("utf-8")
    sha256 = NO_SHA256 if template is False else hashlib.sha256(template).hexdigest()
    return {
        "format": "dspark-tokens", "version": "1", "seq_length": str(settings.seq_length),
        "pad_token_id": str(tok.pad_token_id), "chat_template_sha256": sha256,
        "train_data_path": str(settings.train_data_path), "train_split": json.dumps(settings.train_split),
        "shuffle_seed": str(settings.shuffle_seed),
        **{key: json.dumps(getattr(settings, key)) for key in ("mask_reasoning_content", "mask_generation_prompt")},
        "tokenizer_xxh3_128": tokenizer_xxh3_128(settings.target_model_name_or_path),
    }

def spill(opt, ids, masks):
    """All rows through the workers into the spill files: (offsets, counts). Invalid rows are listed as they come."""
    skip, progress = "skip-invalid" in opt, Progress(work.source.total, "quiet" not in opt)
    counts, offsets = collections.Counter(), array.array("q", [0])
    for weight, (some_ids, some_masks, lengths, bad, some_counts) in results(opt["jobs"]):
        counts.update(some_counts, bad=len(bad))
        for place, why_bad in () if skip and "quiet" in opt else bad:
            progress.clear()
            say(f"{place}: {why_bad}")
        if not counts["bad"] or skip:
            with guard(f"cannot write a spill file in '{tempfile.gettempdir()}' (see TMPDIR)"):
                write_all(ids.fileno(), some_ids)
                write_all(masks.fileno(), some_masks)
            for n in lengths: offsets.append(offsets[-1] + n)
        progress.add(weight, some_counts["rows"])
    progress.clear()
    if counts["bad"] and not skip:
        raise Stop(1, f"{counts['bad']} of {counts['rows']} rows are invalid; mend them or use --skip-invalid")
    return offsets, counts

def tokenize(opt):
    with output(opt["output"]) as fd, tempfile.TemporaryFile(buffering=0) as ids, \
            tempfile.TemporaryFile(buffering=0) as masks:
        settings, tok = prepare(opt)
        offsets, counts = spill(opt, ids, masks)
        write_tokens(fd, metadata_of(settings, tok), offsets, ids, masks)
    if "quiet" in opt: return
    least = opt["min-loss-tokens"]
    if counts["unfound"]: say(f"warning: {counts['unfound']} turns show no reasoning_content; nothing was masked there")
    if not counts["supervised"]: say("warning: no token is supervised: see --show ROW and recipe_args.chat_template")
    say(f"{opt['output']}: {len(offsets) - 1} rows, {offsets[-1]} tokens, {counts['supervised']} supervised, "
        f"{counts['cut']} rows cut to {settings.seq_length}"
        + (f", {counts['bad']} invalid rows dropped" if "skip-invalid" in opt else "")
        + (f", {counts['short']} rows under {least} supervised tokens dropped" if least else ""))

# ---------------------------------------------------------------------------------------------- show
def show(wanted, length):
    place, thunk = work.source.find(wanted)
    with guard(place, RowError): row = encode_row(thunk)
    edges = [i for i, (a, b) in enumerate(zip([0] + row.mask, row.mask + [0])) if a != b]
    runs = list(zip(edges[::2], edges[1::2]))
    head = f"row {wanted} ({place}): {len(row.ids)} tokens, {sum(row.mask)} supervised in {len(runs)} runs"
    head += f", {row.cut} cut at seq_length {length}" if row.cut else ""
    opening, closing = ("\033[7m", "\033[27m") if os.isatty(1) else ("\u27e6", "\u27e7")
    text = "".join(opening + piece + closing if marked else piece for piece, marked in marked_text(row, runs))
    put(f"{head}\n{text}" + ("" if text.endswith("\n") else "\n"))

def marked_text(row, runs):
    """Yield (piece of the kept text, supervised?), control characters made harmless."""
    def printable(text): return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)
    text = row.text if row.encoding else work.encoder.tok.decode(row.ids)
    places = row.encoding.offsets if row.encoding else [
        tuple(len(work.encoder.tok.decode(row.ids[:k])) for k in (i, i + 1)) for i in range(len(row.ids))]
    at, stop = (min(p[0] for p in places), max(p[1] for p in places)) if row.cut else (0, len(text))
    for start, end in runs:
        first, last = max(at, places[start][0]), max(p[1] for p in places[start:end])
        yield printable(text[at:first]), False
        yield printable(text[first:last]), True
        at = max(first, last)
    yield printable(text[at:stop]), False

# ---------------------------------------------------------------------------------------------- main
def prepare(opt):
    """Recipe, tokenizer and rows; sets `work`."""
    global work
    warn = (lambda message: None) if "quiet" in opt else lambda message: say(f"warning: {message}")
    settings = Settings(read_recipe(opt["config"], opt["set"], warn))
    tok = load_tokenizer(settings)
    encoder, data = Encoder(tok, settings), settings.train_data_path if opt["rows"] is None else opt["rows"]
    if sys.modules["torch"] is None: del sys.modules["torch"]      # `datasets` believes what it finds there
    source = Source(data, settings.train_split, settings.shuffle_seed, opt["rows"] == "-")
    work = Work(source, encoder, opt["min-loss-tokens"])
    if "verbose" in opt:
        say(f"tokenizer {type(tok).__name__}, {len(tok)} entries, pad {tok.pad_token_id}; loss mask from "
            + ("{% generation %} blocks" if encoder.by_generation else "conversation prefixes"))
    return settings, tok

def run(argv):
    opt = parse_args(argv)
    if "help" in opt: return put(HELP)
    if "version" in opt: return put(f"{PROGRAM} (dspark) {'unbuilt' if VERSION.startswith('@') else VERSION}\n")
    check_args(opt)
    if "show" in opt: show(opt["show"], prepare(opt)[0].seq_length)
    else: tokenize(opt)
def on_signal(signum, frame):
    raise Signalled(signal.Signals(signum).name)
def main():
    warnings.simplefilter("ignore")
    for fd in (0, 1, 2):                          # a closed one must not become a data file; its use shall fail
        if not os.path.exists(f"/dev/fd/{fd}"): os.open("/dev/null", os.O_WRONLY if fd == 0 else os.O_RDONLY)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) is not signal.SIG_IGN: signal.signal(name, on_signal)
    try:
        run(sys.argv[1:])
        return 0
    except Stop as e:
        code, message = e.args
        say(message + (f"\nTry '{PROGRAM} --help' for more information" if code == 2 else ""))
        return code
    except Signalled as e: say(f"stopped by {e}; nothing was written")
    except MemoryError: say("out of memory; try again with fewer jobs (-j)")
    except Exception as e: say(f"failed: {type(e).__name__}: {why(e)}")
    return 3

if __name__ == "__main__": sys.exit(main())
