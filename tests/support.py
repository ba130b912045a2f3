"""Test doubles: a tokenizer of bytes and a model that says what a script tells it, with the interfaces of the real ones.

With them a test knows every token in advance, so that half an emoji, a stop string over three tokens or a fault at step 7 happen exactly when wanted."""
import re, time
from dataclasses import dataclass
import numpy as np
from sparkinfer.models.forward import StepResult
from sparkinfer.ops.sampling import SampleSpec, sample


class TinyTokenizer:
    "Ids 0-255 are bytes, then the control tokens, then any longer pieces that a test asks for"
    CONTROL = ('<|end|>', '<|system|>', '<|user|>', '<|assistant|>')

    def __init__(self, *pieces):
        self.pieces = [bytes([i]) for i in range(256)] + [c.encode() for c in self.CONTROL] + [p.encode() if isinstance(p, str) else p for p in pieces]
        self.control = {c: 256 + i for i, c in enumerate(self.CONTROL)}
        self.special_ids = frozenset(self.control.values())
        self.eos_ids, self.eos_id, self.bos_id, self.add_bos = frozenset([256]), 256, None, False
        self.control_starts = self.special_starts = re.compile('|'.join(f'<(?={re.escape(c[1:])})' for c in self.CONTROL))   # what ChatTemplate.encode asks for
        self.vocab_size = len(self.pieces)
        longest = sorted((p for i, p in enumerate(self.pieces) if i not in self.special_ids), key=len, reverse=True)
        self._ids = {p: i for i, p in enumerate(self.pieces)}
        self._plain = re.compile(b'|'.join([re.escape(p) for p in longest if len(p) > 1] + [b'.']), re.DOTALL)
        self._special = re.compile('(' + '|'.join(re.escape(c) for c in self.CONTROL) + ')')

    def split_special(self, text): return [self.control.get(part, part) for part in self._special.split(text) if part]

    def encode(self, text, special=False, add_bos=None):
        parts = self.split_special(text) if special else [text]
        return [i for part in parts for i in ([part] if isinstance(part, int) else [self._ids[p] for p in self._plain.findall(part.encode())])]

    def token_bytes(self, i): return self.pieces[i]

    def decode(self, ids, skip_special=True):
        return b''.join(self.pieces[i] for i in ids if not (skip_special and i in self.special_ids)).decode('utf-8', errors='replace')


TEMPLATE = """{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True)
class TinyConfig:
    vocab_size: int
    context_length: int
    layer_kinds: tuple = ('attention',)


class ScriptedRunner:
    """A runner whose model is a Python function: `script(history) -> token id | logits | exception`.

    It keeps each slot's tokens as its memory and computes from these, so a wrong position or a stale prefix gives a wrong answer, as with a real KV cache.
    `gate`, if given, is called before each step with the batch and may wait, count or raise."""
    def __init__(self, script, tokenizer, max_context=512, gate=None, layer_kinds=('attention',)):
        self.script, self.gate, self.max_context, self.num_slots = script, gate, max_context, 1
        self.config = TinyConfig(tokenizer.vocab_size, max_context, layer_kinds)
        self.memory, self.steps, self.closed = {}, [], False
        sample(np.zeros(4, np.float32), SampleSpec(num_logprobs=0))   # compile now: a client's first request should not wait for it

    def load(self, weights, max_context=None, num_slots=1, progress=None): return self

    def submit(self, batch, sampling=None):
        if self.gate: self.gate(batch)
        self.steps.append((int(batch.positions[0]), len(batch)))
        logits, wanted = {}, set(batch.output_rows.tolist())
        for row, (token, position, slot) in enumerate(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist())):
            memory = self.memory.setdefault(slot, [])
            assert position <= len(memory), f'position {position} leaves a hole after {len(memory)}'
            assert position < self.max_context, 'position past the context'
            del memory[position:]
            memory.append(token)
            if row in wanted: logits[row] = self.row_of(self.script(list(memory)))
        rows = [logits[r] for r in batch.output_rows.tolist()]
        if sampling is None: return StepResult(logits=np.array(rows, np.float32))
        drawn = [sample(row, spec) for row, spec in zip(rows, sampling, strict=True)]
        return StepResult(np.array([d.token for d in drawn], np.int32), np.array([d.logprob for d in drawn], np.float32), None, tuple((d.top_ids, d.top_logprobs) for d in drawn))

    def row_of(self, said):
        if isinstance(said, Exception): raise said
        if isinstance(said, np.ndarray): return said.astype(np.float32)
        row = np.zeros(self.config.vocab_size, np.float32)
        row[said] = 20
        return row

    def collect(self, handle): return handle
    def reset(self, slot): self.memory[slot] = []
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


def babble(vocab_size, seed=0):
    "A script whose logits depend on every token of the history: two histories agree on them only if they are the same"
    return lambda history: np.random.default_rng([seed, *history]).normal(size=vocab_size) * 3


def slowly(seconds):
    "A gate that makes each step take time"
    return lambda batch: time.sleep(seconds)
