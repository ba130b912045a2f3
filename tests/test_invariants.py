"""Cold = warm = chunked = batched = preempted = forked: the tokens of an answer do not depend on what else happened.

On a llama, a dense hybrid and a mixture-of-experts hybrid of tiny size, through the real engine, memory and CPU kernels, at temperature 1 with a seed, so that any other bit in the logits would soon show as another token.
Lengths of prompts lie around the borders of pages (16) and chunks (64): 1, 2, 15 to 17, 63 to 65, 127 to 129.
On a machine with a GPU: `SPARKINFER_TEST_DEVICE=cuda pytest tests/test_invariants.py` (or `cuda:1` …). There one row and eight go through different kernels, whose sums have another order, so two answers may part where two tokens were as good as each other (`Model.equal`); nowhere else."""
import os, threading
import numpy as np
import pytest

from sparkinfer.engine.engine import Engine
from sparkinfer.engine.request import Request, SamplingParams
from sparkinfer.formats.gguf import open_gguf
from sparkinfer.memory.model_memory import ModelMemory
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.convert import convert
from sparkinfer.models.cpu_runner import CpuRunner
from sparkinfer.models.weights import Weights
from sparkinfer.models.forward import Batch
from sparkinfer.ops.sampling import SampleSpec, adjust_logits_spec, gumbel_noise, noise_key
from references import dressed
from support import Late, TinyTokenizer

DEVICE = os.environ.get('SPARKINFER_TEST_DEVICE') or 'cpu'
ON_GPU = DEVICE != 'cpu'
TIE = .05               # nearer than this, in logits, are two tokens as good as each other on a GPU

MODELS = {'llama': 'llama', 'dense hybrid': 'qwen3_5-r2', 'experts hybrid': 'qwen3_5_moe'}
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
CONTEXT, ANSWER = 176, 8

class WideTokenizer(TinyTokenizer):
    "As many ids as the model has; those without a text of their own say '.'"
    def __init__(self, vocab_size):
        super().__init__(*['.'] * max(0, vocab_size - 260))
        self.vocab_size, self.special_ids, self.eos_ids = vocab_size, frozenset([256]), frozenset()

class LateRunner(Late, CpuRunner):
    "The CPU's kernels; their tokens come one step late, as a GPU's do"

class Model:
    def __init__(self, folder, name):
        self.name, path = name, folder/'model.gguf'
        convert(dressed(MODELS[name], folder), path, 'Q8_0')
        self.file = open_gguf(path)
        self.weights = Weights.from_checkpoint(self.file, ModelConfig.from_checkpoint(self.file))
        size, random = self.weights.config.vocab_size, np.random.default_rng(1)
        self.tokenizer, base = WideTokenizer(size), random.integers(0, size, 129)
        self.prompts = [base[:n] for n in LENGTHS] + [np.concatenate([base[:n - n // 3], random.integers(0, size, n // 3)]) for n in LENGTHS[2:]]    # many begin alike, and differ later
        with self.engine(slots=1, cache=False) as engine: self.want = [self.ask(engine, p).collect()[0].token_ids for p in self.prompts]

    def engine(self, slots=4, pages=None, cache=True, late=False, **settings):
        runner = self.runner(late).load(self.weights, max_context=CONTEXT, num_slots=slots, num_pages=pages or slots * CONTEXT // 16)
        return Engine(runner, self.tokenizer, memory=ModelMemory(runner, prefix_cache=cache), **settings)

    def runner(self, late):
        if not ON_GPU: return (LateRunner if late else CpuRunner)(2)
        from sparkinfer.cuda.graphs import use_card
        from sparkinfer.models.cuda_runner import CudaRunner
        use_card(int(DEVICE.partition(':')[2] or 0))
        return CudaRunner('f32' if self.weights.config.head_dim % 64 else 'f16')

    def equal(self, prompt, got, want, choice=0, **knobs):
        "Whether two answers to a prompt are the same. On a GPU they may part where their tokens were as good as each other, as the CPU sees it"
        if not ON_GPU or got == want: return got == want
        step = next(i for i, (g, w) in enumerate(zip(got, want)) if g != w)
        history = np.concatenate([prompt, want[:step]]).astype(np.int32)
        runner = CpuRunner(2).load(self.weights, max_context=CONTEXT)
        logits = runner.submit(Batch.of(history)).logits[-1]
        runner.close()
        bias = knobs.get('logit_bias', {})
        spec = SampleSpec(history_ids=history, prompt_length=len(prompt), bias_ids=np.array(list(bias), np.int32), bias_values=np.array(list(bias.values()), np.float32), **{k: v for k, v in knobs.items() if k.endswith('penalty')})
        score, heat = adjust_logits_spec(logits, spec).astype(np.float64), knobs.get('temperature', 1.0)
        if heat: score = score / heat + gumbel_noise(np.uint64(noise_key(np.uint64(7), np.uint64(choice), np.uint64(step))), np.arange(len(score)))
        gap = abs(score[got[step]] - score[want[step]])
        print(f'answers of {self.name} to {len(prompt)} tokens part at {step}: {gap:.1e} between their tokens')
        return gap < TIE

    def ask(self, engine, prompt, **knobs):
        return engine.submit(Request(np.asarray(prompt), SamplingParams(**{**dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, max_tokens=ANSWER, ignore_eos=True), **knobs})))

@pytest.fixture(scope='module', params=MODELS)
def model(request, tmp_path_factory):
    made = Model(tmp_path_factory.mktemp('invariants'), request.param)
    yield made
    made.file.close()

def settled(engine):
    "Nothing is held any more, and all counts agree"
    engine.call(engine.memory.check)
    stats = engine.stats()
    assert (stats['running'], stats['waiting'], stats['memory']['held_pages'], stats['memory']['free_slots']) == (0, 0, 0, engine.memory.num_slots)

def answers(model, engine, order):
    "What these prompts, all there before the first step, are answered"
    hold = threading.Event()
    holder = threading.Thread(target=engine.call, args=(hold.wait,))
    holder.start()
    streams = {k: model.ask(engine, model.prompts[k]) for k in order}
    hold.set()
    holder.join()
    return {k: s.collect()[0].token_ids for k, s in streams.items()}

@pytest.mark.parametrize('settings', [dict(), dict(cache=False), dict(step_rows=5, mixed_rows=3), dict(step_rows=64, mixed_rows=17), dict(slots=6, pages=24), dict(slots=3, pages=12, step_rows=33), dict(late=True), dict(late=True, slots=6, pages=18)],
                         ids=['batched', 'no cache', 'small chunks', 'odd chunks', 'preempted', 'hardly any pages', 'one step behind', 'one step behind, preempted'])
def test_company_chunks_and_preemption_change_nothing(model, settings):
    order = np.random.default_rng(len(str(settings))).permutation(len(model.prompts)).tolist()
    with model.engine(**settings) as engine:
        for _ in range(2):                                       # the second time most of each prompt is in memory
            got = answers(model, engine, order)
            assert all(model.equal(p, got[k], model.want[k]) for k, p in enumerate(model.prompts))
            settled(engine)
        stats = engine.stats()
        if settings.get('slots') == 6: assert stats['preempted'] > 0
        if settings.get('cache', True) and not settings.get('pages'): assert stats['memory']['hit_tokens'] > 0

def test_warm_is_cold(model):
    "Each prompt after each shorter one, alone: a beginning that is found, at every border, gives what computing it gives"
    with model.engine(slots=2) as engine:
        for k, prompt in enumerate(model.prompts):
            assert model.equal(prompt, model.ask(engine, prompt).collect()[0].token_ids, model.want[k])
        settled(engine)
        hits = engine.stats()['memory']['hit_tokens']
        assert hits > 0

def test_a_conversation_reads_only_what_is_new(model):
    "Turn after turn: the history and the answer are found, whatever kind of memory the layers have; an edited middle falls back, and says what a fresh engine says"
    with model.engine(slots=2) as engine, model.engine(slots=1, cache=False) as fresh:
        history, said = model.prompts[4].tolist(), []
        for turn in range(4):
            answer = model.ask(engine, history).collect()[0]
            assert model.equal(history, answer.token_ids, model.ask(fresh, history).collect()[0].token_ids)
            if turn: assert answer.usage.cached_tokens == known, (turn, answer.usage)
            known = len(history) + ANSWER - 1                    # the last token was drawn and never read
            history += answer.token_ids + [3, 1, turn]
        edited = history[:20] + [5] + history[21:]
        answer = model.ask(engine, edited).collect()[0]
        assert model.equal(edited, answer.token_ids, model.ask(fresh, edited).collect()[0].token_ids) and answer.usage.cached_tokens <= 20
        settled(engine)

def test_answers_to_one_prompt_part_at_its_end(model):
    "n answers from one reading of the prompt are those of n readings; more answers than slots"
    with model.engine(slots=3) as engine, model.engine(slots=1, cache=False) as fresh:
        for k in (0, 4, 8):
            together = model.ask(engine, model.prompts[k], n=5).collect()
            for choice, (c, alone) in enumerate(zip(together, model.ask(fresh, model.prompts[k], n=5).collect(), strict=True)): assert model.equal(model.prompts[k], c.token_ids, alone.token_ids, choice)
            assert model.equal(model.prompts[k], together[0].token_ids, model.want[k]) and len({tuple(c.token_ids) for c in together}) > 1
        settled(engine)

def test_penalties_bias_and_logprobs_inside_a_batch(model):
    "Each request its own knobs, beside others: as alone, to the last bit of the log-probabilities"
    knobs = [dict(repetition_penalty=1.5), dict(frequency_penalty=1.0, presence_penalty=.5), dict(logit_bias={5: 4.0, 9: -100}), dict(logprobs=4), dict(temperature=0.0, logprobs=0), dict(top_k=3, min_p=.1), dict(top_p=.5)]
    def spell(c): return c.token_ids, [(l.token_id, l.logprob, l.top) for l in c.logprobs]
    with model.engine(slots=1, cache=False) as fresh: alone = [spell(model.ask(fresh, model.prompts[6], **k).collect()[0]) for k in knobs]
    with model.engine(slots=7) as engine:
        streams = [model.ask(engine, model.prompts[6], **k) for k in knobs]
        got = [spell(s.collect()[0]) for s in streams]
        assert got == alone if not ON_GPU else all(model.equal(model.prompts[6], g[0], w[0], **k) for g, w, k in zip(got, alone, knobs, strict=True))
        settled(engine)

PENALTIES = [dict(presence_penalty=1.5), dict(frequency_penalty=1.0, temperature=0.0), dict(repetition_penalty=1.4), dict(presence_penalty=.5, frequency_penalty=.5, repetition_penalty=1.1)]

@pytest.mark.parametrize('settings', [dict(slots=1, cache=False), dict(), dict(slots=6, pages=16)], ids=['alone', 'together', 'preempted'])
def test_penalties_look_back_on_a_token_in_flight(model, settings):
    "One step behind, each draw counts a token that the engine does not know yet. Few tokens have a chance, so one that is not counted, or twice, is another answer; the same seeds from an engine that waits for each step"
    asked, few = [(p, k) for p in model.prompts[3:9] for k in PENALTIES], {t: 8.0 for t in (5, 9, 66, 200, *model.prompts[4][:3].tolist())}
    def ask(engine, prompt, knobs): return model.ask(engine, prompt, max_tokens=24, logit_bias=few, **knobs)
    with model.engine(slots=1, cache=False) as engine:
        if ON_GPU: wait_for_each_step(engine)
        want = [ask(engine, *a).collect()[0].token_ids for a in asked]
    assert all(len(set(w)) < len(w) for w in want)
    with model.engine(late=True, **settings) as engine:
        got = [s.collect()[0].token_ids for s in [ask(engine, *a) for a in asked]]
        assert got == want if settings.get('slots') == 1 else all(model.equal(p, g, w, logit_bias=few, **k) for (p, k), g, w in zip(asked, got, want))     # alone the kernels are the same, and a tie is no excuse
        if settings.get('pages'): assert engine.stats()['preempted'] > 0
        settled(engine)

def wait_for_each_step(engine):
    "Nothing is in flight any more when a step has been begun"
    submit, collect = engine.runner.submit, engine.runner.collect
    engine.runner.submit = lambda batch, sampling=None: collect(submit(batch, sampling))
    engine.runner.collect = lambda result: result

def test_what_was_cancelled_is_never_seen(model):
    "Cancel in the prompt, in the answer and while waiting, then ask for something else in the same slots (and for the same again)"
    with model.engine(slots=2, step_rows=16) as engine:
        for k in range(6):
            doomed = [model.ask(engine, model.prompts[10 - j], max_tokens=40) for j in range(4)]
            for _ in range(k): next(doomed[0])
            for stream in doomed: stream.cancel()
            assert all(list(s)[-1].reason in ('cancelled', 'length') for s in doomed)
            assert all(model.equal(model.prompts[i], ids, model.want[i]) for i, ids in answers(model, engine, [k, 10 - k]).items())
        settled(engine)
