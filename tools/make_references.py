"""Remake `data/reference/tiny`: small random checkpoints of each family and what transformers makes of them.

    pip install -e '.[parity]'
    python tools/make_references.py [FOLDER] [--only NAME …]

It imports nothing of this package: what we are compared with must not come from us. What is written is explained in data/reference/README.md.
"""
import argparse, json, os, platform, sys, zlib
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ['HF_HUB_OFFLINE'] = '1'
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
                          Qwen3NextConfig, Qwen3NextForCausalLM)

PROMPTS, STEPS, SEED = (1, 2, 63, 64, 65, 75, 130), 8, 3          # with this seed float32 stays within 3e-5 of float64; others have positions that amplify rounding three times more
WHOLE = 75                  # of the prompt of this length all rows are kept, or as many as the case says
LAST = {1: 1, 2: 2, 130: 4}  # of the others these many, or the last one

BASE = dict(vocab_size=264, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=32, max_position_embeddings=4096, rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type='default', rope_theta=1e4))
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
HYBRID = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4,
              rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=.25))
MROPE = dict(rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=.25, mrope_section=[2, 1, 1], mrope_interleaved=True))
FIVE = BASE | HYBRID | MROPE

# name: (config class, model class, config, how the checkpoint is dressed, other settings for the same weights)
CASES = {
    'llama':        (LlamaConfig, LlamaForCausalLM, BASE | dict(tie_word_embeddings=False), dict(rows=12, old=True), {}),
    'qwen3':        (Qwen3Config, Qwen3ForCausalLM, BASE | dict(tie_word_embeddings=True), dict(rows=12, old=True), {}),
    'qwen3_moe':    (Qwen3MoeConfig, Qwen3MoeForCausalLM, BASE | MOE | dict(tie_word_embeddings=True), dict(experts='single', rows=12, old=True), {'raw': dict(norm_topk_prob=False), 'all': dict(num_experts_per_tok=4)}),
    'qwen3_next':   (Qwen3NextConfig, Qwen3NextForCausalLM, BASE | HYBRID | MOE | dict(shared_expert_intermediate_size=32, tie_word_embeddings=False), dict(experts='single', old=True, exact=('A_log', 'dt_bias')), {'raw': dict(norm_topk_prob=False)}),
    'qwen3_5-r1':   (Qwen3_5TextConfig, Qwen3_5ForCausalLM, FIVE | dict(linear_num_value_heads=2, tie_word_embeddings=True), dict(rows=12), {}),
    'qwen3_5-r2':   (Qwen3_5TextConfig, Qwen3_5ForCausalLM, FIVE | dict(tie_word_embeddings=False), dict(mtp=True), {}),
    'qwen3_5-r3':   (Qwen3_5TextConfig, Qwen3_5ForCausalLM, FIVE | dict(linear_num_value_heads=6, vocab_size=262, tie_word_embeddings=True), dict(exact=('A_log',), rows=12), {}),
    'qwen3_5_moe':  (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {k: v for k, v in FIVE.items() if k != 'intermediate_size'} | {k: v for k, v in MOE.items() if k != 'norm_topk_prob'} | dict(shared_expert_intermediate_size=32, tie_word_embeddings=False),
                     dict(mtp=True, multimodal=True), {}),
}

# ---- weights ----

SPREAD = {'q_proj': 1.5, 'k_proj': 1.5, 'in_proj_qkv': 1.5, 'in_proj_qkvz': 1.5, 'in_proj_b': 1.5, 'in_proj_ba': 1.5, 'mlp.gate.weight': 2., 'gate_up_proj': 1.5, 'gate_proj': 1.5, 'up_proj': 1.5, 'lm_head': 2.}
DECAYS = (.01, 300., .3, 4., .05, 30.)          # exp(A_log) of the heads: from a memory of a hundred tokens to e^-300, which underflows

def draw(name, shape, tied, plain_norms, layer):
    "Values of one parameter: wide enough that attention prefers some tokens and that no norm, head, channel or expert can be mistaken for another"
    random = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    x = random.normal(size=shape)
    if name.endswith('A_log'): return np.log(np.array([DECAYS[(i + 2 * layer) % len(DECAYS)] for i in range(shape[0])])) + .1 * x
    if name.endswith('dt_bias'): return .5 * x
    if 'norm' in name:
        plain = plain_norms or 'linear_attn.norm' in name
        around = 1.5 if 'q_norm' in name or 'k_norm' in name else 1.
        return around - (not plain) + .2 * x
    if 'embed_tokens' in name: return x * (2 / np.sqrt(shape[-1]) if tied else 1)
    if 'conv1d' in name: return x / np.sqrt(shape[-1])
    return x * next((s for part, s in SPREAD.items() if part in name), 1.) / np.sqrt(shape[-1])

def fill(module, prefix, tied, plain_norms, exact=()):
    "Give every parameter its values, exact in bfloat16 (or in float32 for names that end like one of `exact`)"
    for name, p in module.named_parameters():
        name = prefix + name
        layer = int(name.split('layers.')[1].split('.')[0]) if 'layers.' in name else 0
        values = torch.tensor(draw(name, tuple(p.shape), tied, plain_norms, layer), dtype=torch.float32)
        if not name.endswith(exact or ('\0',)): values = values.bfloat16()
        p.data = values.to(p.dtype)

# ---- the block for multi-token prediction ----

class Mtp(torch.nn.Module):
    """transformers has no class for it. The layer and the norms are transformers' own; the wiring (embedding half first, the trunk's hidden state after its final norm, everything one position to the left) is as published implementations agree."""
    def __init__(self, model):
        super().__init__()
        trunk = model.model
        config = type(model.config)(**(model.config.to_dict() | dict(num_hidden_layers=1, layer_types=['full_attention'])))
        config._attn_implementation, config._experts_implementation = 'eager', 'eager'
        layer, norm = type(trunk.layers[0]), type(trunk.norm)
        self.layers = torch.nn.ModuleList([layer(config, 0)])
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.trunk, self.head = [trunk], [model.lm_head]      # in lists: not parameters of this module

    def forward(self, ids, hidden):
        "ids: (n,), the token after each position; hidden: (n, width), the trunk's (or this block's own) state at it → (logits, state after the norm)"
        trunk, n = self.trunk[0], len(ids)
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(trunk.embed_tokens(ids)), self.pre_fc_norm_hidden(hidden)], -1))[None]
        mask = torch.full((n, n), float('-inf'), dtype=x.dtype).triu(1)[None, None]
        position = torch.arange(n)[None, None].expand(3, 1, n)
        state = self.norm(self.layers[0](x, position_embeddings=trunk.rotary_emb(x, position), attention_mask=mask))[0]
        return self.head[0](state), state

@torch.no_grad()
def mtp_record(mtp, model, ids, drafts=3):
    """Teacher-forced on the whole prompt, then `drafts` tokens on its own: the first draft's hidden state is the trunk's, later ones' are the block's own.
    mtp_logits: (len(ids) - 1, vocab), row i predicts ids[i + 2]; draft_ids: (drafts + 1,), the trunk's best token and the drafted ones; draft_logits: (drafts, vocab)"""
    hidden = model.model(torch.tensor(ids)[None]).last_hidden_state[0]
    logits, _ = mtp(torch.tensor(ids[1:]), hidden[:-1])
    following, states, rows = [*ids[1:], int(model.lm_head(hidden[-1]).argmax())], hidden, []
    for _ in range(drafts):
        step, state = mtp(torch.tensor(following), states)
        rows.append(step[-1])
        following.append(int(step[-1].argmax()))
        states = torch.cat([states, state[-1:]])
    return dict(mtp_logits=logits, draft_ids=np.array(following[len(ids) - 1:], np.int32), draft_logits=torch.stack(rows))

# ---- records ----

@torch.no_grad()
def record(model, ids, rows=WHOLE):
    "Logits for every prompt length, each in one call with a fresh cache, and for single steps after the prompt of `WHOLE` tokens"
    found = {}
    for length in PROMPTS:
        cache = DynamicCache(config=model.config)
        logits = run(model, ids[:length], cache)
        found[f'prompt_{length}'] = logits[-(rows if length == WHOLE else LAST.get(length, 1)):]
        if length == WHOLE: found['steps'] = torch.cat([run(model, ids[i:i + 1], cache) for i in range(WHOLE, WHOLE + STEPS)])
        if length == max(PROMPTS): longest = logits
    one_by_one = DynamicCache(config=model.config)
    stepped = torch.cat([run(model, ids[i:i + 1], one_by_one) for i in range(WHOLE)])[-rows:]
    return found, dict(steps_against_prompt=worst(found['steps'], longest[WHOLE:WHOLE + STEPS]), token_by_token_against_prompt=worst(stepped, found[f'prompt_{WHOLE}']), largest_logit=float(longest.abs().max()))

@torch.no_grad()
def character(model, ids):
    """Is there anything to get wrong? attention_entropy: nats, of the rows that see more than half of the prompt, at most log(len(ids)); decay: the least and the largest factor a state is multiplied by in one step, and the share of them that is 0 in float32;
    best_token_ahead: median distance of the two best logits"""
    decays = []
    def watch(layer, module, inputs, output):
        if output.shape[-1] != layer.num_v_heads: output = output[0].reshape(len(ids), layer.num_k_heads, 2, -1)[:, :, 1].reshape(len(ids), -1)
        decays.append((-layer.A_log.exp() * torch.nn.functional.softplus(output + layer.dt_bias)).exp().float().flatten())
    hooks = [m.linear_attn.__getattr__(n).register_forward_hook(lambda *a, layer=m.linear_attn: watch(layer, *a)) for m in model.model.layers if hasattr(m, 'linear_attn') for n in ('in_proj_a', 'in_proj_ba') if hasattr(m.linear_attn, n)]
    out = model(torch.tensor(ids)[None], output_attentions=True)
    for hook in hooks: hook.remove()
    weights = torch.cat([a[0][:, len(ids) // 2:] for a in out.attentions if a is not None])
    ahead = out.logits[0].topk(2).values
    found = dict(attention_entropy=float(-(weights * weights.clamp_min(1e-300).log()).sum(-1).mean()), best_token_ahead=float((ahead[:, 0] - ahead[:, 1]).median()))
    if decays: found |= dict(least_decay=float(torch.cat(decays).min()), largest_decay=float(torch.cat(decays).max()), decays_that_are_zero=float((torch.cat(decays) == 0).double().mean()))
    return found

def run(model, ids, cache):
    return model(torch.tensor(ids)[None], use_cache=True, cache=cache).logits[0]

def worst(a, b): return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())

def stored(values):
    "float32 with the last eight bits of the mantissa rounded away: off by 8e-6 at most, and a quarter smaller when compressed"
    bits = np.ascontiguousarray(values.numpy() if torch.is_tensor(values) else values, np.float32).view(np.uint32)
    return ((bits + 0x80) & np.uint32(0xFFFFFF00)).view(np.float32)

# ---- checkpoints ----

def checkpoint(model, mtp, dress):
    "Tensors under the names that published checkpoints of the family use"
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings: state.pop('lm_head.weight', None)
    if mtp is not None: state |= {f'mtp.{name}': value for name, value in mtp.state_dict().items()}
    if dress.get('experts') == 'single':
        for name in [n for n in state if '.experts.' in n]:
            stack, where = state.pop(name), name.rsplit('.', 1)[0]
            for e, values in enumerate(stack):
                parts = dict(zip(('gate', 'up'), values.chunk(2))) if name.endswith('gate_up_proj') else {'down': values}
                state |= {f'{where}.{e}.{part}_proj.weight': w for part, w in parts.items()}
    if dress.get('multimodal'): state = {name.replace('model.', 'model.language_model.', 1) if name.startswith('model.') else name: value for name, value in state.items()}
    exact = dress.get('exact') or ('\0',)
    return {name: value.to(torch.float32 if name.endswith(exact) else torch.bfloat16).contiguous().clone() for name, value in state.items()}

DROPPED = ('_name_or_path', 'transformers_version', 'architectures', 'id2label', 'label2id', 'problem_type', 'return_dict', 'output_hidden_states', 'output_attentions', 'output_router_logits', 'router_aux_loss_coef', 'chunk_size_feed_forward',
           'is_encoder_decoder', 'initializer_range', 'use_cache', 'attention_dropout', 'pretraining_tp', 'dtype')

def config_json(model, mtp, dress):
    "config.json as it is published"
    text = {k: v for k, v in model.config.to_dict().items() if k not in DROPPED and v is not None} | dict(dtype='bfloat16', tie_word_embeddings=model.config.tie_word_embeddings)
    if mtp is not None: text['mtp_num_hidden_layers'] = 1
    if dress.get('old'):                                      # as files were written before transformers 5
        rope = text.pop('rope_parameters')
        text |= {k: v for k, v in rope.items() if k != 'rope_type'} | dict(rope_scaling=None, torch_dtype=text.pop('dtype'))
        if text.pop('layer_types', None): text['full_attention_interval'] = 4
        if 'num_local_experts' in text: text['num_experts'] = text.pop('num_local_experts')
    name = type(model).__name__
    if not dress.get('multimodal'): return dict(architectures=[name]) | text
    return dict(architectures=[name.replace('ForCausalLM', 'ForConditionalGeneration')], model_type=text['model_type'].removesuffix('_text'), text_config=text, tie_word_embeddings=text['tie_word_embeddings'])

def build(config_class, model_class, settings, dress, dtype=torch.float64):
    config = config_class(**settings)
    config._attn_implementation, config._experts_implementation = 'eager', 'eager'          # the grouped kernel for experts takes no float64
    model = model_class(config).to(dtype).eval()
    plain_norms = model_class in (LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)
    exact = dress.get('exact', ())
    fill(model, '', config.tie_word_embeddings, plain_norms, exact)
    if config.tie_word_embeddings: model.tie_weights()
    mtp = None
    if dress.get('mtp'):
        mtp = Mtp(model).to(dtype).eval()
        fill(mtp, 'mtp.', False, plain_norms, exact)
    return model, mtp

def make_case(name, out):
    config_class, model_class, settings, dress, variants = CASES[name]
    ids = np.random.default_rng([SEED, zlib.crc32(name.encode())]).integers(0, settings['vocab_size'], max(PROMPTS)).tolist()
    folder, about = out/name, {}
    folder.mkdir(parents=True, exist_ok=True)
    for variant, changes in {'': {}, **variants}.items():
        model, mtp = build(config_class, model_class, settings | changes, dress)
        found, figures = record(model, ids, dress.get('rows', WHOLE))
        single, single_mtp = build(config_class, model_class, settings | changes, dress, torch.float32)
        figures['float32_against_float64'] = max(worst(theirs.double(), found[key]) for key, theirs in record(single, ids, dress.get('rows', WHOLE))[0].items())
        if mtp is not None: found |= mtp_record(mtp, model, ids[:WHOLE])
        if mtp is not None: found['mtp_logits'] = found['mtp_logits'][-4:]
        if variant: found = {key: value for key, value in found.items() if key in ('steps', 'prompt_65')}
        suffix = f'-{variant}' if variant else ''
        np.savez_compressed(folder/f'logits{suffix}.npz', ids=np.array(ids, np.int32), **{key: stored(value) if key != 'draft_ids' else value for key, value in found.items()})
        (folder/f'config{suffix}.json').write_text(json.dumps(config_json(model, mtp, dress | dict(old=dress.get('old') and variant != 'all')), indent=1, sort_keys=True) + '\n')
        if not variant:
            save_file(checkpoint(model, mtp, dress), folder/'model.safetensors', metadata={'format': 'pt'})
            (folder/'model.safetensors').chmod(0o644)
            figures |= character(model, ids[:WHOLE])
        about[name + suffix] = figures
        print(f'{name + suffix:16}', ' '.join(f'{k} {v:.1e}' for k, v in figures.items()), flush=True)
    return about

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', nargs='?', type=Path, default=Path(__file__).resolve().parent.parent/'data'/'reference'/'tiny')
    parser.add_argument('--only', nargs='*', default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name in arguments.only: figures |= make_case(name, arguments.folder)
    if set(arguments.only) != set(CASES): return
    about = dict(command='python tools/make_references.py', seed=SEED, prompts=PROMPTS, steps=STEPS, versions={p: version(p) for p in ('torch', 'transformers', 'safetensors', 'numpy')} | {'python': platform.python_version()}, machine=platform.machine(), cases=figures)
    (arguments.folder/'about.json').write_text(json.dumps(about, indent=1) + '\n')

if __name__ == '__main__': main()
