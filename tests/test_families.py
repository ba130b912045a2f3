"""Every family against transformers: data/reference/tiny holds checkpoints and logits, remade by `python tools/make_references.py`; what is in them stands in data/reference/README.md.

The plain forward pass must agree to 1e-4, the fast one to 1e-3 with float32 weights, whatever the cuts in which a text reaches it, from the folder and from the GGUF file that `models.convert` makes of it. llama.cpp, where it is installed, reads the same file.
"""
import importlib.util, json, subprocess, sys
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from sparkinfer.errors import SparkinferError, UnsupportedError
from sparkinfer.formats.blocks import quant_type
from sparkinfer.formats.gguf import Tensor, open_gguf
from sparkinfer.formats.safetensors import open_folder
from sparkinfer.measure.accuracy import dequantised, llama_cpp_logits
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.convert import convert
from sparkinfer.models.forward import Batch, SpecRunner
from sparkinfer.models.weights import Weights
from references import TINY, dressed

FAMILIES = ('llama', 'qwen3', 'qwen3_moe', 'qwen3_next', 'qwen3_5-r1', 'qwen3_5-r2', 'qwen3_5-r3', 'qwen3_5_moe')
VARIANTS = {'qwen3_moe-raw': 'qwen3_moe', 'qwen3_moe-all': 'qwen3_moe', 'qwen3_next-raw': 'qwen3_next'}        # another config.json for the same weights
WHOLE = ('qwen3_next', 'qwen3_5-r2', 'qwen3_5_moe')                                 # recorded at each of the first 75 positions
HYBRIDS = tuple(name for name in FAMILIES if name.startswith(('qwen3_next', 'qwen3_5')))
LIMITS = {'spec': 1e-4, 'cpu32': 1e-3}                # the plain runner, and the fast one with float32 weights and memory
needs = lambda package: pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f'{package} comes with the parity extra')
def each(*names): return pytest.mark.parametrize('kind, name', [(kind, name) for kind in LIMITS for name in names])

def suffix(name): return name.removeprefix(VARIANTS[name]) if name in VARIANTS else ''

@lru_cache(None)
def record(name): return dict(np.load(TINY/VARIANTS.get(name, name)/f'logits{suffix(name)}.npz'))

@lru_cache(None)
def folder_weights(name):
    folder = TINY/VARIANTS.get(name, name)
    checkpoint = open_folder(folder)
    config = ModelConfig.from_hf(json.loads((folder/f'config{suffix(name)}.json').read_text()), checkpoint.tensors)
    return Weights.from_checkpoint(checkpoint, config)

def make(kind, weights, num_slots=1, max_context=144):
    if kind == 'spec': return SpecRunner().load(weights, max_context=max_context, num_slots=num_slots)
    from sparkinfer.models.cpu_runner import CpuRunner
    return CpuRunner(2, kv_type='f32').load(dequantised(weights), max_context=max_context, num_slots=num_slots)

@lru_cache(None)
def runner_of(kind, name, num_slots=2):
    "Loaded once; every test resets the slots that it uses"
    return make(kind, folder_weights(name), num_slots)

def feed(runner, ids, cuts=(), start=0, slot=0):
    "Logits of every token of `ids`, cut before the positions `cuts` (counted from the first)"
    edges = [0, *cuts, len(ids)]
    return np.concatenate([runner.collect(runner.submit(Batch.of(ids[a:b], start=start + a, slot=slot, outputs='all'))).logits for a, b in zip(edges, edges[1:]) if b > a])

def fresh(runner, ids, cuts=(), slot=0):
    runner.reset(slot)
    return feed(runner, ids, cuts, 0, slot)

def worst(logits, reference):
    assert logits.shape == reference.shape and logits.dtype == np.float32 and np.isfinite(logits).all()
    return float((np.linalg.norm(logits - reference, axis=-1) / np.linalg.norm(reference, axis=-1)).max())

def edited(weights, changes):
    "The same model with float32 values in place of some tensors"
    def tensor(name, values): return Tensor(name, values.shape, quant_type('F32'), np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8))
    return Weights(weights.config, {name: tensor(name, changes[name]) if name in changes else weights.table[name] for name in weights}, weights.unused)

def values_of(weights, ending): return {name: weights[name].dequantize() for name in weights if name.endswith(ending)}

# ---- what transformers says ----

@each(*FAMILIES, *VARIANTS)
def test_prompts_of_every_length(kind, name):
    "One token, two (fewer than the convolution looks back on), one less and one more than a chunk, more than a chunk, more than two; each from nothing"
    runner, rec = runner_of(kind, name), record(name)
    prompts = {int(key.split('_')[1]): rows for key, rows in rec.items() if key.startswith('prompt_')}
    assert len(prompts) == (1 if name in VARIANTS else 7)
    errors = {length: worst(fresh(runner, rec['ids'][:length])[-len(rows):], rows) for length, rows in prompts.items()}
    assert max(errors.values()) <= LIMITS[kind], errors

@each(*FAMILIES)
@pytest.mark.parametrize('cuts', [(), (1,), (2, 3), (63,), (64,), (65,), (7, 14, 64, 70), tuple(range(1, 75))], ids=lambda cuts: f'{len(cuts)} cuts from {cuts[0]}' if cuts else 'whole')
def test_cuts_do_not_matter(kind, name, cuts):
    "The prompt in one piece, in odd pieces, token by token; then eight single steps. Guards against a convolution that starts anew at a cut, a state or a key that a piece loses, and positions that restart"
    runner, rec = runner_of(kind, name), record(name)
    prompt, steps = rec['prompt_75'], rec['steps']
    logits = fresh(runner, rec['ids'][:83], (*cuts, *range(75, 83)))
    assert worst(logits[75:], steps) <= LIMITS[kind] and worst(logits[75 - len(prompt):75], prompt) <= LIMITS[kind]

@each(*WHOLE)
def test_a_window_that_is_not_full_yet(kind, name):
    "The first tokens see fewer than four inputs of the convolution. Guards against a window filled from the wrong end, or with what another sequence left"
    runner, rec = runner_of(kind, name), record(name)
    for cuts in [(1,), (2,), (3,), (1, 2), (1, 2, 3, 4), (4,), (5,)]:
        assert worst(fresh(runner, rec['ids'][:6], cuts), rec['prompt_75'][:6]) <= LIMITS[kind], cuts

# ---- would it be noticed? ----

def swapped(first, second): return lambda w: {f'layers.{i}.{a}': w[f'layers.{i}.{b}'].dequantize() for i in range(4) for a, b in ((first, second), (second, first)) if f'layers.{i}.{a}' in w}
def changed(ending, change): return lambda w: {name: change(v) for name, v in values_of(w, ending).items()}
def gate_first(v): return v.reshape(-1, 2, 32, v.shape[-1])[:, ::-1].reshape(v.shape)

FAULTS = {      # name: (case, change of the config, change of the weights)
    'grouped heads taken for tiled ones': ('qwen3_5-r2', dict(delta_tiled=True), None), 'the same with three to one': ('qwen3_5-r3', dict(delta_tiled=True), None),
    'all of a head rotates': ('qwen3_5-r2', dict(rope_dim=32), None), 'rope partners side by side': ('qwen3_next', dict(rope_interleaved=True), None), 'weights of experts not normalised': ('qwen3_moe', dict(norm_topk=False), None), 'one expert': ('qwen3_5_moe', dict(experts_per_token=1), None),
    'no norm of queries and keys': ('qwen3', dict(qk_norm=False), None), 'gate before query': ('qwen3_5-r2', {}, changed('attn.q', gate_first)), 'alpha for beta': ('qwen3_next', {}, swapped('delta.a', 'delta.b')), 'taps in reverse': ('qwen3_5-r1', {}, changed('delta.conv', lambda v: v[:, ::-1])),
    'no bias of the decay': ('qwen3_5-r1', {}, changed('delta.dt', lambda v: 0 * v)), 'one added to the gated norm': ('qwen3_5-r2', {}, changed('delta.norm', lambda v: v + 1)), 'one added too few': ('qwen3_next', {}, changed('k_norm', lambda v: v - 1)), 'gate for up': ('qwen3_5_moe', {}, swapped('shared.gate', 'shared.up')),
    'no gate of the shared expert': ('qwen3_next', {}, changed('shared.router', lambda v: 0 * v)), 'experts in another order': ('qwen3_5_moe', {}, changed('moe.down', lambda v: v[::-1]))}

@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_would_be_noticed(fault):
    "Faults that engines had, made on purpose. Guards against a record that is too dull to show them"
    name, fields, change = FAULTS[fault]
    weights, rec = folder_weights(name), record(name)
    if change is not None:
        assert (changes := change(weights))
        weights = edited(weights, changes)
    wrong = Weights(replace(weights.config, **fields), weights.table, weights.unused)
    assert worst(fresh(make('spec', wrong), rec['ids'][:75])[-12:], rec['prompt_75'][-12:]) > 100 * LIMITS['spec']

# ---- one sequence beside another ----

@each(*FAMILIES)
def test_nothing_leaks_from_one_sequence_into_the_next(kind, name):
    "A slot is used again. Guards against a state, a window or keys that outlive their sequence"
    runner, rec = runner_of(kind, name), record(name)
    fresh(runner, rec['ids'][::-1][:100])
    for length in (1, 2, 75):
        rows = rec[f'prompt_{length}']
        assert worst(fresh(runner, rec['ids'][:length])[-len(rows):], rows) <= LIMITS[kind]

@each(*FAMILIES)
def test_sequences_side_by_side(kind, name):
    "Two sequences in the same steps, out of step with each other. Guards against memory that is found by row rather than by slot"
    runner, rec = runner_of(kind, name), record(name)
    ids, other = rec['ids'][:75], rec['ids'][20:110]
    alone = fresh(runner, other, slot=1)
    for slot in (0, 1): runner.reset(slot)
    pieces, edges = {0: [], 1: []}, {0: (0, 3, 4, 40, 75), 1: (0, 30, 33, 89, 90)}
    for i in range(4):
        parts = {slot: Batch.of((ids, other)[slot][edges[slot][i]:edges[slot][i + 1]], start=edges[slot][i], slot=slot, outputs='all') for slot in (1, 0)}
        logits, at = runner.collect(runner.submit(Batch.join(parts.values()))).logits, 0
        for slot, part in parts.items():
            pieces[slot].append(logits[at:at + len(part)])
            at += len(part)
    assert worst(np.concatenate(pieces[0])[-len(rec['prompt_75']):], rec['prompt_75']) <= LIMITS[kind]
    assert worst(np.concatenate(pieces[1]), alone) <= LIMITS[kind]

# ---- decays ----

def test_the_record_holds_decays_that_underflow():
    "… since the tests above are to prove something about them"
    cases = json.loads((TINY/'about.json').read_text())['cases']
    for name in HYBRIDS: assert cases[name]['least_decay'] == 0 and cases[name]['decays_that_are_zero'] > .05 and cases[name]['largest_decay'] > .99

@each('qwen3_5-r2', 'qwen3_next')
@pytest.mark.parametrize('decay', [-1e-30, -6.5, -26., -104., -1e4, -1e30])
def test_decays_of_any_strength(kind, name, decay):
    "Products of 64 decays overflow or vanish in every way that a chunk can be computed wrongly. Guards against inf · 0, against exponents taken with the wrong sign, and against dividing by a decay that is nothing"
    weights = folder_weights(name)
    weights = edited(weights, {n: np.full(v.shape, decay, np.float32) for n, v in values_of(weights, 'delta.decay').items()})
    runner, ids = make(kind, weights), record(name)['ids']
    steps = fresh(runner, ids, range(1, 130))
    assert worst(fresh(runner, ids), steps) <= LIMITS[kind]

# ---- routing ----

MOE = ('qwen3_moe', 'qwen3_moe-raw', 'qwen3_moe-all', 'qwen3_next', 'qwen3_5_moe')

@each(*MOE)
def test_only_differences_between_router_logits_matter(kind, name):
    "The same vector added to each expert's row moves all logits of a token alike, for about half of the tokens far below zero. Guards against a search for the largest that begins at zero"
    weights, ids = folder_weights(name), record(name)['ids'][:75]
    routers = values_of(weights, 'moe.router')
    assert len(routers) >= 4
    shift = np.random.default_rng(1).normal(size=64).astype(np.float32)
    moved = make(kind, edited(weights, {n: v + shift for n, v in routers.items()}))
    assert worst(fresh(moved, ids), fresh(runner_of(kind, name), ids)) <= LIMITS[kind]

def as_dense(weights, chosen, share):
    "A model without experts that computes what this one does when the router always picks `chosen` with weight `share` each: their layers side by side"
    config = replace(weights.config, architecture='qwen3', ffn_kinds=('dense',) * weights.config.num_layers, intermediate_size=len(chosen) * weights.config.expert_size, num_experts=0, experts_per_token=0, expert_size=0)
    table = {name: weights[name].dequantize() for name in weights if '.moe.' not in name}
    for i in range(config.num_layers):
        gate, up, down = (weights[f'layers.{i}.moe.{part}'].dequantize()[chosen] for part in ('gate', 'up', 'down'))
        table |= {f'layers.{i}.ffn.gate': np.concatenate(gate), f'layers.{i}.ffn.up': np.concatenate(up), f'layers.{i}.ffn.down': share * np.concatenate(down, axis=1)}
    return Weights(config, {name: Tensor(name, v.shape, quant_type('F32'), np.ascontiguousarray(v, np.float32).reshape(-1).view(np.uint8)) for name, v in table.items()})

CHOSEN = {'qwen3_moe': ([0, 1], .5), 'qwen3_moe-raw': ([0, 1], .25), 'qwen3_moe-all': ([0, 1, 2, 3], .25)}

@each(*CHOSEN)
def test_equal_router_logits(kind, name):
    "A router of zeros: the first experts win, with equal weights, and the model is one without experts. Guards against ties that pick one expert twice, and against a normalisation of the wrong sum"
    weights, ids = folder_weights(name), record(name)['ids'][:75]
    tied = make(kind, edited(weights, {n: np.zeros_like(v) for n, v in values_of(weights, 'moe.router').items()}))
    assert worst(fresh(tied, ids), fresh(make(kind, as_dense(weights, *CHOSEN[name])), ids)) <= LIMITS[kind]

def test_variants_differ():
    "Normalised or not, two experts or all: a test that one code path passes for both would prove nothing"
    ours = fresh(runner_of('spec', 'qwen3_moe'), record('qwen3_moe')['ids'][:65])[-1:]
    for variant in ('qwen3_moe-raw', 'qwen3_moe-all'): assert worst(ours, record(variant)['prompt_65']) > .05

# ---- multi-token prediction ----

@pytest.mark.parametrize('name', ['qwen3_5-r2', 'qwen3_5_moe'])
@pytest.mark.parametrize('cuts', [(), (1, 2, 64)], ids=['whole', 'pieces'])
def test_multi_token_prediction(name, cuts):
    "The block after the prompt, then drafting from its own hidden states. Guards against the two halves of its input exchanged, hidden states from before the final norm, tokens of the same position, and norms without their one"
    runner, rec = make('spec', folder_weights(name)), record(name)
    fresh(runner, rec['ids'][:75])
    hidden, edges = runner.hidden, [0, *cuts, 74]
    logits = np.concatenate([runner.mtp_step(Batch.of(rec['ids'][a + 1:b + 1], start=a, outputs='all'), hidden[a:b])[0] for a, b in zip(edges, edges[1:])])
    assert worst(logits[-4:], rec['mtp_logits']) <= LIMITS['spec']
    state, drafts = hidden[74:], rec['draft_ids']
    for i, row in enumerate(rec['draft_logits']):
        logits, state = runner.mtp_step(Batch.of(drafts[i:i + 1], start=74 + i), state)
        assert worst(logits, row[None]) <= LIMITS['spec'] and logits.argmax() == drafts[i + 1]

# ---- GGUF ----

@pytest.fixture(scope='module')
def gguf_file(tmp_path_factory):
    "name → the checkpoint converted to a GGUF file with a vocabulary, in float32"
    folder = tmp_path_factory.mktemp('families')
    @lru_cache(None)
    def write(name):
        convert(dressed(name, folder), folder/f'{name}.gguf', 'F32')
        return folder/f'{name}.gguf'
    return write

@each(*FAMILIES)
def test_the_gguf_file_is_the_same_model(kind, name, gguf_file):
    "Value heads tiled, norms with their one added, decays and not their logarithms, rows of rope partners side by side, experts stacked. Guards against any of it done once too often or not at all, and against a rule for the experts' weights that the file does not state"
    rec = record(name)
    with open_gguf(gguf_file(name)) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        assert config.delta_tiled == name.startswith('qwen3_5') and config.norm_topk
        runner = make(kind, Weights.from_checkpoint(checkpoint, config))
        logits = fresh(runner, rec['ids'][:83], (11, 64, *range(75, 83)))
        runner.close()
    prompt = rec['prompt_75']
    assert worst(logits[75:], rec['steps']) <= LIMITS[kind] and worst(logits[75 - len(prompt):75], prompt) <= LIMITS[kind]

@pytest.mark.parametrize('name', ['qwen3_moe-raw', 'qwen3_next-raw'])
def test_what_gguf_cannot_say_is_refused(name, tmp_path):
    folder = dressed(VARIANTS[name], tmp_path, 'config-raw.json')
    with pytest.raises(UnsupportedError, match='norm_topk_prob'): convert(folder, tmp_path/'x.gguf', 'F32')
    assert not (tmp_path/'x.gguf').exists()

@needs('xllamacpp')
@pytest.mark.parametrize('name', FAMILIES)
def test_llama_cpp_reads_the_same_model(name, gguf_file):
    "An implementation that shares nothing with transformers or with us. Its keys and values are half floats, hence the wide tolerance where there is much attention"
    rec = record(name)
    logits = np.concatenate(list(llama_cpp_logits(gguf_file(name), rec['ids'])))
    recorded = np.concatenate([rec['prompt_75'], rec['steps'], rec['prompt_130']])
    rows = logits[np.r_[75 - len(rec['prompt_75']):75, 75:83, 126:130]]
    spec = fresh(runner_of('spec', name), rec['ids'])
    assert worst(rows, recorded) <= .02 and (logits.argmax(-1) == spec.argmax(-1)).mean() >= .99

@pytest.mark.parametrize('key, value', [('ssm.inner_size', 1 << 26), ('ssm.state_size', (1 << 31) - 1), ('ssm.group_count', 1 << 20)])
def test_sizes_from_a_strangers_header_allocate_nothing(tmp_path, key, value):
    "Tables of row numbers were made from header numbers before any tensor's shape had been looked at: gigabytes for a small file"
    import tracemalloc
    from sparkinfer.formats.gguf import write_gguf
    from sparkinfer.models.synthetic import synth
    synth('tiny-qwen35moe', tmp_path/'good.gguf', to='F32')
    with open_gguf(tmp_path/'good.gguf') as good:
        write_gguf(tmp_path/'bad.gguf', {**good.metadata, f'qwen35moe.{key}': value}, good.tensors)
    with open_gguf(tmp_path/'bad.gguf') as bad:
        tracemalloc.start()
        with pytest.raises(SparkinferError): Weights.from_checkpoint(bad, ModelConfig.from_checkpoint(bad))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 5e6, peak

@pytest.mark.filterwarnings('ignore:invalid value')
@pytest.mark.parametrize('where', ['blk.2.ffn_up_exps.weight', 'blk.0.ssm_a', 'output_norm.weight'])
def test_a_number_that_is_none(tmp_path, where, gguf_file):
    "A damaged file says at its first step which tensor is to blame, and not only that a row of logits cannot be used"
    from sparkinfer.formats.gguf import write_gguf
    from sparkinfer.llm import load_runner, open_model
    with open_gguf(gguf_file('qwen3_5_moe')) as good:
        values = good.tensors[where].dequantize()
        values[..., :1] = np.nan
        spoilt = Tensor(where, values.shape, quant_type('F32'), np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8))
        write_gguf(tmp_path/'damaged.gguf', good.metadata, good.tensors | {where: spoilt})
    parts = open_model(tmp_path/'damaged.gguf')
    with parts.checkpoint, pytest.raises(SparkinferError, match=f'damaged: .*{where} is the first tensor'): load_runner(parts, 64, 1, 'spec')

@pytest.mark.parametrize('command', ['bench', 'warmup'])
def test_a_folder_without_a_tokenizer(command):
    "One line that says which file is missing and what writes it"
    done = subprocess.run([sys.executable, '-m', 'sparkinfer', command, str(TINY/'qwen3')], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith('error: ') and 'no tokenizer.json' in done.stderr and done.stderr.count('\n') == 1, done.stderr
