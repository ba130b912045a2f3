"""Models of noise against other people's readers: one seed, a folder for transformers and a file for llama.cpp, the same logits. That also proves the conversion's names and orders in both directions."""
import importlib.util

import numpy as np
import pytest

from sparkinfer.models.convert import convert
from sparkinfer.models.synthetic import SHAPES, shape_of, synth, tensor_shapes, type_of

TINY = [name for name in SHAPES if name.startswith('tiny-')]
IDS = np.random.default_rng(0).integers(0, 900, 40)
needs = lambda package: pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f'{package} comes with the parity extra')

def llama_cpp(path, ids=IDS):
    from sparkinfer.measure.accuracy import llama_cpp_logits
    return np.concatenate(list(llama_cpp_logits(path, ids)))

@needs('xllamacpp')
@pytest.mark.parametrize('name', TINY)
def test_llama_cpp_opens_each_family_and_every_token_counts(name, tmp_path):
    synth(name, path := tmp_path/f'{name}.gguf')
    logits, other = llama_cpp(tmp_path/'x.gguf'), llama_cpp(tmp_path/'x.gguf', [(IDS[0] + 1) % 900, *IDS[1:]])
    assert logits.shape == (40, 1024) and np.isfinite(logits).all() and np.abs(logits[-1] - other[-1]).max() > .1

@needs('xllamacpp')
@needs('transformers')
@pytest.mark.parametrize('name', TINY)
def test_transformers_and_llama_cpp_agree(name, tmp_path):
    "float32 on both sides; llama.cpp keeps keys and values in halves, hence the tolerance"
    import torch, transformers
    synth(name, tmp_path/'x.gguf', to='F32'), synth(name, tmp_path/'x', 'safetensors', to='F32')
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path/'x', dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad(): theirs = model.eval()(torch.tensor(IDS)[None]).logits[0].numpy()
    ours = llama_cpp(tmp_path/'x.gguf')
    assert np.abs(theirs - ours).max() < .1 and (theirs.argmax(-1) == ours.argmax(-1)).mean() >= .975
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path/'x')
    assert tokenizer.decode(tokenizer.encode('<|im_start|>what is the 12 x')) == '<|im_start|>what is the 12 x' and tokenizer.chat_template

@needs('xllamacpp')
@needs('compressed_tensors')
def test_the_compressed_tensors_twin_loads_in_transformers(tmp_path):
    import torch, transformers
    synth('tiny-qwen3', tmp_path/'x.gguf', to='F32')
    convert(tmp_path/'x.gguf', tmp_path/'twin', 'NVFP4', layout='compressed-tensors')
    convert(tmp_path/'twin', tmp_path/'back.gguf', 'F32')
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path/'twin', dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    with torch.no_grad(): theirs = model.eval()(torch.tensor(IDS)[None]).logits[0].numpy()
    ours = llama_cpp(tmp_path/'back.gguf')
    assert np.corrcoef(theirs.ravel(), ours.ravel())[0, 1] > .99           # it decodes through bfloat16

def test_one_seed_one_model(tmp_path):
    for name in ('tiny-qwen35', 'tiny-llama'):
        for format in ('gguf', 'safetensors'):
            for i in range(2): synth(name, tmp_path/f'{name}{i}.{format}', format)
        a, b = (tmp_path/f'{name}{i}.gguf' for i in range(2))
        assert a.read_bytes() == b.read_bytes()
        a, b = (tmp_path/f'{name}{i}.safetensors'/'model.safetensors' for i in range(2))
        assert a.read_bytes() == b.read_bytes()

def test_large_shapes_have_the_mix_that_speed_was_measured_with():
    mix = lambda name, i=0: {n.removeprefix(f'blk.{i}.'): type_of(SHAPES[name], n) for n in tensor_shapes(shape_of(name, 4)) if n.startswith(f'blk.{i}.') or not n.startswith('blk.')}
    dense, hybrid, experts = mix('qwen3.8-27b'), mix('qwen3.6-35b-a3b'), mix('qwen3-30b-a3b')
    assert all(m['token_embd.weight'] == 'Q4_K' and m['output.weight'] == 'Q6_K' and m['ffn_gate_exps.weight' if 'ffn_gate_exps.weight' in m else 'ffn_gate.weight'] == 'Q4_K' for m in (dense, hybrid, experts))
    assert dense['ffn_down.weight'] == 'Q4_K' and mix('qwen3.8-27b', 1)['ffn_down.weight'] == 'Q6_K' and dense['attn_qkv.weight'] == dense['ssm_out.weight'] == 'Q4_K' and mix('qwen3.8-27b', 3)['attn_v.weight'] == 'Q6_K'
    assert hybrid['attn_qkv.weight'] == hybrid['attn_gate.weight'] == hybrid['ssm_out.weight'] == hybrid['ffn_up_shexp.weight'] == mix('qwen3.6-35b-a3b', 3)['attn_v.weight'] == 'Q8_0' and hybrid['ffn_down_exps.weight'] == 'Q5_K' and hybrid['ffn_gate_inp.weight'] == 'F32'
    assert experts['attn_q.weight'] == experts['attn_output.weight'] == 'Q4_K' and experts['attn_v.weight'] == experts['ffn_down_exps.weight'] == 'Q6_K' and hybrid['ssm_alpha.weight'] == 'Q8_0' and hybrid['ssm_conv1d.weight'] == 'F32'

def test_shapes_of_qwens_families_take_tools(tmp_path):
    "So that tools can be tried without a large file: the parser knows the form of the template, and the template writes what it is given"
    from sparkinfer.formats.gguf import open_gguf
    from sparkinfer.text.chat_template import ChatTemplate
    from sparkinfer.text.reasoning_tools import Markup
    from sparkinfer.text.tokenizer import Tokenizer
    tool = dict(type='function', function=dict(name='weather', parameters=dict(type='object', properties={})))
    for name, form in (('tiny-qwen3', 'hermes'), ('tiny-llama', '')):
        synth(name, path := tmp_path/f'{name}.gguf')
        with open_gguf(path) as file: template = ChatTemplate.from_gguf(file.metadata, Tokenizer.from_gguf(file.metadata))
        assert Markup.from_template(template.source).call_format == form
        text = template.render([dict(role='user', content='hi')], tools=[tool])
        assert ('"weather"' in text) == bool(form) and text.endswith('<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n')
