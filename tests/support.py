"""Test doubles: a tokenizer of bytes and a model that says what a script tells it, with the interfaces of the real ones.

With them a test knows every token in advance, so that half an emoji, a stop string over three tokens or a fault at step 7 happen exactly when wanted."""
import re, time
from dataclasses import dataclass, replace
import numpy as np
from sparkinfer.models.forward import StepResult
from sparkinfer.ops.sampling import Sampled, SampleSpec, sample

try: from sparkinfer.ops.attention import PAGE
except ImportError: PAGE = 16


class TinyTokenizer:
    "Ids 0-255 are bytes, then the control tokens, then any longer pieces that a test asks for; `markup` are tokens such as `<think>`, whose spelling in a request is no token"
    CONTROL = ('<|end|>', '<|system|>', '<|user|>', '<|assistant|>')

    def __init__(self, *pieces, markup=()):
        spelled = (*self.CONTROL, *markup)
        self.pieces = [bytes([i]) for i in range(256)] + [c.encode() for c in spelled] + [p.encode() if isinstance(p, str) else p for p in pieces]
        self.control = {c: 256 + i for i, c in enumerate(spelled)}
        self.special_ids = frozenset(self.control[c] for c in self.CONTROL)
        self.markup_tokens = {c: self.control[c] for c in markup}
        self.eos_ids, self.eos_id, self.bos_id, self.add_bos = frozenset([256]), 256, None, False
        self.control_starts, self.special_starts = (re.compile('|'.join(f'<(?={re.escape(c[1:])})' for c in some)) for some in (self.CONTROL, spelled))   # what ChatTemplate.encode asks for
        self.vocab_size = len(self.pieces)
        longest = sorted((p for i, p in enumerate(self.pieces) if i not in self.control.values()), key=len, reverse=True)
        self._ids = {p: i for i, p in enumerate(self.pieces)}
        self._plain = re.compile(b'|'.join([re.escape(p) for p in longest if len(p) > 1] + [b'.']), re.DOTALL)
        self._special = re.compile('(' + '|'.join(re.escape(c) for c in spelled) + ')')

    def token_id(self, text): return self.control.get(text)

    def split_special(self, text): return [self.control.get(part, part) for part in self._special.split(text) if part]

    def encode(self, text, special=False, add_bos=None):
        parts = self.split_special(text) if special else [text]
        return [i for part in parts for i in ([part] if isinstance(part, int) else [self._ids[p] for p in self._plain.findall(part.encode())])]

    def token_bytes(self, i): return self.pieces[i]

    def decode(self, ids, skip_special=True):
        return b''.join(self.pieces[i] for i in ids if not (skip_special and i in self.special_ids)).decode('utf-8', errors='replace')


TEMPLATE = """{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


class Late:
    """Before a runner among the bases: what a step draws stays with the runner until it is collected, in order, and the next step names it by -1, among its tokens and at the end of a history, as on a GPU.
    `broken` is raised by the next `collect`"""
    broken = None

    def submit(self, batch, sampling=None):
        flying, drawn = self.__dict__.setdefault('flying', []), self.__dict__.setdefault('drawn', {})
        tokens = np.array([drawn[slot] if token < 0 else token for token, slot in zip(batch.tokens.tolist(), batch.slots.tolist())], np.int32)
        if sampling is not None: sampling = [self.told(spec, drawn, int(batch.slots[row])) for spec, row in zip(sampling, batch.output_rows, strict=True)]
        result = super().submit(replace(batch, tokens=tokens), sampling)
        self.drawn = {}
        if sampling is None or any(s.num_logprobs > 100 for s in sampling): return result
        self.drawn = {int(batch.slots[row]): max(0, int(token)) for row, token in zip(batch.output_rows, result.tokens)}       # of this step only: an older one is known
        assert len(flying) < 2, 'more than two steps in flight'
        handle = [result]
        flying.append(handle)
        return handle

    def told(self, spec, drawn, slot):
        history = spec.history_ids
        assert (history[:-1] >= 0).all(), 'more than one token of a history is in flight'
        return replace(spec, history_ids=np.append(history[:-1], np.int32(drawn[slot]))) if len(history) and history[-1] < 0 else spec

    def collect(self, handle):
        if not isinstance(handle, list): return super().collect(handle)
        assert handle is self.flying.pop(0), 'steps are collected in the order in which they were begun'
        error, self.broken = self.broken, None
        if error is not None: raise error
        return handle[0]


@dataclass(frozen=True)
class TinyConfig:
    vocab_size: int
    context_length: int
    layer_kinds: tuple = ('attention',)


class ScriptedRunner:
    """A runner whose model is a Python function: `script(history) -> token id | logits | exception`.

    The history is read back from pages through the slot's block table, so a wrong position, a stale table or a page shared by mistake gives a wrong answer, as with a real KV cache;
    with a recurrent layer each slot also keeps a hash of its history, which must be that of what the pages say.
    `gate`, if given, is called before each step with the batch and may wait, count or raise. An exception that the script *returns* belongs to its row alone."""
    def __init__(self, script, tokenizer, max_context=512, gate=None, layer_kinds=('attention',), num_slots=4, num_pages=None):
        self.script, self.gate, self.max_context, self.num_slots = script, gate, max_context, num_slots
        self.config = TinyConfig(tokenizer.vocab_size, max_context, layer_kinds)
        self.kv_type, self.steps, self.closed = 'f32', [], False
        per_slot = -(-max_context // PAGE)
        self.num_pages = num_pages or num_slots * per_slot
        self.block_tables = np.zeros((num_slots, per_slot), np.int32)
        self.pages = np.full((self.num_pages, PAGE), -1, np.int32)
        self.states, self.lengths = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        self.page_bytes, self.state_bytes = 4 * PAGE, 0 if self.can_truncate else 8
        sample(np.zeros(4, np.float32), SampleSpec(num_logprobs=0))   # compile now: a client's first request should not wait for it

    @property
    def can_truncate(self): return set(self.config.layer_kinds) == {'attention'}
    def load(self, weights, max_context=None, num_slots=1, progress=None, num_pages=None): return self

    def memory(self, slot):
        "The tokens that a slot holds, read through its table"
        length = int(self.lengths[slot])
        return self.pages[self.block_tables[slot, :-(-length // PAGE)]].reshape(-1)[:length].tolist()

    def take(self, token, position, slot):
        assert position < self.max_context, 'position past the context'
        assert position <= self.lengths[slot] and (self.can_truncate or position in (0, self.lengths[slot])), f'position {position} after {self.lengths[slot]}'
        self.lengths[slot] = position
        history = self.memory(slot)
        if not self.can_truncate:
            if position == 0: self.states[slot] = hash(())
            assert self.states[slot] == hash(tuple(history)), f'slot {slot}: the state is not that of the pages'
        self.pages[self.block_tables[slot, position // PAGE], position % PAGE] = token
        self.lengths[slot] = position + 1
        history.append(token)
        if not self.can_truncate: self.states[slot] = hash(tuple(history))
        return history

    def submit(self, batch, sampling=None):
        if self.gate: self.gate(batch)
        self.steps.append((int(batch.positions[0]), len(batch)))
        said, wanted = {}, {row: 0 if sampling is None else sampling[k].step for k, row in enumerate(batch.output_rows.tolist())}
        for row, (token, position, slot) in enumerate(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist())):
            history = self.take(token, position, slot)
            if row in wanted: said[row] = self.script(history, wanted[row]) if isinstance(self.script, Answering) else self.script(history)
        rows = [said[r] for r in batch.output_rows.tolist()]
        if sampling is None: return StepResult(logits=np.array([self.row_of(r) for r in rows], np.float32))
        drawn = [self.draw(row, spec) for row, spec in zip(rows, sampling, strict=True)]
        good = [d if isinstance(d, Sampled) else Sampled(-1, np.nan, (), ()) for d in drawn]
        return StepResult(np.array([d.token for d in good], np.int32), np.array([d.logprob for d in good], np.float32), None, tuple((d.top_ids, d.top_logprobs) for d in good),
                          tuple(d if isinstance(d, Exception) else None for d in drawn))

    def draw(self, said, spec):
        try: return sample(self.row_of(said), spec)
        except Exception as error: return error

    def row_of(self, said):
        if isinstance(said, Exception): raise said
        if isinstance(said, np.ndarray): return said.astype(np.float32)
        row = np.zeros(self.config.vocab_size, np.float32)
        row[said] = 20
        return row

    def collect(self, handle): return handle
    def reset(self, slot): self.lengths[slot] = 0
    def set_length(self, slot, length): self.lengths[slot] = length
    def copy_page(self, source, target): self.pages[target] = self.pages[source]
    def read_page(self, page): return self.pages[page].view(np.uint8).copy()
    def write_page(self, page, data): self.pages[page] = np.asarray(data, np.uint8).view(np.int32)
    def copy_state(self, source, target): self.states[target] = self.states[source]
    def read_state(self, slot): return self.states[slot:slot + 1].view(np.uint8)[:self.state_bytes].copy()
    def write_state(self, slot, data): self.states[slot] = np.asarray(data, np.uint8).view(np.int64)[0]
    def close(self): self.closed = True


def saying(tokenizer, reply):
    """A script that answers `reply` (text, ids, or a function of the prompt's text giving either), then the end token.
    The answer begins after the last `<|assistant|>` or, in a raw prompt, after the last '='."""
    marks = {tokenizer.control['<|assistant|>'], ord('=')}
    def script(history):
        start = max((i for i, t in enumerate(history) if t in marks), default=-1) + 1
        said = reply(tokenizer.decode(history[:start])) if callable(reply) else reply
        ids = tokenizer.encode(said) if isinstance(said, str) else said
        done = len(history) - start
        return ids[done] if done < len(ids) else 256
    return script


class Answering:
    """A script that knows where its prompt ends, so that prompt and answer may hold anything. `reply`: a text; a list whose items (texts, bytes or ids) are one token each;
    a dict, of which the first entry whose key stands in the prompt counts; or a function of the prompt's text that gives one of these. After it comes the end token."""
    def __init__(self, tokenizer, reply): self.tokenizer, self.reply = tokenizer, reply

    def ids(self, prompt):
        said = self.reply
        if callable(said): said = said(prompt)
        if isinstance(said, dict): said = next((said[key] for key in said if key in prompt), 'ok')
        if isinstance(said, str): return self.tokenizer.encode(said, special=True)
        return [t if isinstance(t, int) else self.tokenizer._ids[t.encode() if isinstance(t, str) else t] for t in said]

    def __call__(self, history, step):
        ids = self.ids(self.tokenizer.decode(history[:len(history) - step], skip_special=False))
        return ids[step] if step < len(ids) else 256


def thinking_template(calls='hermes', opens=True):
    """A template with reasoning and tools. `calls`: 'hermes' or 'qwen_xml'. `opens`: the prompt ends with `<think>` unless `enable_thinking` is false; else the model writes it itself.
    It says `reasoning_effort` where it has one."""
    begin = {'hermes': """<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>""",
             'qwen_xml': """<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"""}[calls]
    return ("{% if tools %}<|system|>Tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}{% endif %}{% if reasoning_effort is defined %}<|system|>Effort: {{ reasoning_effort }}{% endif %}"
            "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>"
            "{% elif m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
            "{% for c in m.tool_calls or [] %}" + begin + "{% endfor %}{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
            + ("{% else %}<think>\n" if opens else "") + "{% endif %}{% endif %}")


MARKUP = ('<think>', '</think>', '<tool_call>', '</tool_call>')

def scripted_engine(reply, *pieces, template=None, markup=MARKUP, name='org/tiny', gate=None, max_context=4096, num_slots=4, **kwargs):
    """An engine whose model answers `reply` (see `Answering`), token by token. Strings and bytes in a list are tokens of their own, as are `pieces`; all other text is a token for each byte.
    `template`: the source of a chat template, by default `thinking_template()`. `markup`: spellings that are one token where the model writes them; () lets them come byte by byte."""
    from sparkinfer.engine.engine import Engine
    from sparkinfer.text.chat_template import ChatTemplate
    lists = [r for r in (reply.values() if isinstance(reply, dict) else [reply]) if isinstance(r, list)]
    own = {p.encode() if isinstance(p, str) else p for r in lists for p in r if not isinstance(p, int)}
    tokenizer = TinyTokenizer(*pieces, *sorted(p for p in own if len(p) > 1 and p.decode(errors='replace') not in (*TinyTokenizer.CONTROL, *markup)), markup=markup)
    runner = ScriptedRunner(Answering(tokenizer, reply), tokenizer, max_context, gate, num_slots=num_slots)
    return Engine(runner, tokenizer, ChatTemplate(template or thinking_template()), name=name, **kwargs)


def babble(vocab_size, seed=0):
    "A script whose logits depend on every token of the history: two histories agree on them only if they are the same"
    return lambda history: np.random.default_rng([seed, *history]).normal(size=vocab_size) * 3


def slowly(seconds):
    "A gate that makes each step take time"
    return lambda batch: time.sleep(seconds)
