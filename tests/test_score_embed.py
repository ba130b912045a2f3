"""Scores and embeddings of real checkpoints: against the logits that transformers recorded, against transformers' own hidden rows where it is installed, and the same on the NumPy and the CPU runner; then over HTTP with the clients"""
import importlib.util, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
import httpx, numpy as np, ollama, openai, pytest
from sparkinfer.engine.engine import Engine
from sparkinfer.engine.request import Request, SamplingParams
from sparkinfer.formats.safetensors import open_checkpoint
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.cpu_runner import CpuRunner
from sparkinfer.models.forward import SpecRunner
from sparkinfer.models.toy_runner import ToyRunner, toy_tokenizer
from sparkinfer.models.weights import Weights
from sparkinfer.ops.sampling import log_softmax
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.text.chat_template import ChatTemplate
from support import TEMPLATE, TinyTokenizer

TINY = Path(__file__).resolve().parent.parent/'data'/'reference'/'tiny'
FAMILIES = ['llama', 'qwen3', 'qwen3_5-r2', 'qwen3_5_moe']

@contextmanager
def loaded(family, runner, num_slots=2):
    weights = Weights.from_checkpoint(open_checkpoint(TINY/family), ModelConfig.from_checkpoint(open_checkpoint(TINY/family)))
    with Engine(runner.load(weights, max_context=160, num_slots=num_slots), TinyTokenizer('ab', 'cd', 'ef', 'gh')) as engine: yield engine

def record(family): return dict(np.load(TINY/family/'logits.npz'))

@pytest.mark.parametrize('family', FAMILIES)
def test_scores_are_those_of_transformers(family):
    known = record(family)
    ids, expected = known['ids'][:76].tolist(), known['prompt_75']
    with loaded(family, SpecRunner()) as engine:
        for prompt in (1, 40, 64, 75):
            for again in (False, True):                                           # from the cache the second time
                found = engine.score(ids[:prompt], ids[prompt:], top=3)
                first = max(prompt - 1, 75 - len(expected))                       # of some families only the last rows are on record
                rows, entries = [log_softmax(row) for row in expected[first - 75:]], found.entries[first - prompt + 1:]
                assert len(found.entries) == 76 - prompt and len(entries) == len(rows)
                np.testing.assert_allclose([e.logprob for e in entries], [row[t] for row, t in zip(rows, ids[first + 1:])], atol=2e-4)
                assert all(abs(lp - row[i]) < 2e-4 for e, row in zip(entries, rows) for i, lp in e.top)

@pytest.mark.parametrize('family', FAMILIES)
def test_the_cpu_runner_shows_the_same_hidden_rows(family):
    ids = record(family)['ids'].tolist()
    with loaded(family, SpecRunner()) as spec, loaded(family, CpuRunner(num_threads=2, kv_type='f32')) as cpu:
        for n in (1, 2, 17, 64, 65, 130):
            for pooling in ('mean', 'last'):
                a, b = spec.embed(ids[:n], pooling), cpu.embed(ids[:n], pooling)
                assert a @ b > 1 - 2e-3, (family, n, pooling, float(a @ b))       # its activations are rounded to 8 bits
        a, b = (e.score(ids[:9], ids[9:80]) for e in (spec, cpu))
        assert abs(a.total - b.total) < 0.02 * abs(a.total)

@pytest.mark.parametrize('family', FAMILIES)
def test_many_texts_have_the_vectors_that_each_has_alone(family):
    "To the last bit, in ragged steps and whatever is in them: each row's sums are its own, and no piece of a text is cut where a step was full"
    ids = record(family)['ids'].tolist()
    texts = [ids[k:k + n] for k, n in enumerate((1, 130, 5, 64, 2, 65, 3, 100, 17, 1, 9))]
    with loaded(family, CpuRunner(num_threads=2), num_slots=6) as engine:
        alone = {pooling: [engine.embed(text, pooling) for text in texts] for pooling in ('mean', 'last')}
        for order in (texts, texts[::-1]):
            for pooling in alone:
                steps = engine.work['steps']
                together = engine.embed_all(order, pooling)
                assert engine.work['steps'] - steps < sum(-(-len(t) // 64) for t in texts), 'each text has had steps of its own'
                np.testing.assert_array_equal(together, alone[pooling] if order is texts else alone[pooling][::-1])
        stream = engine.submit(Request(ids[:5], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))      # rows of an answer go on between
        np.testing.assert_array_equal(engine.embed_all(texts), alone['mean'])
        stream.collect()
        engine.memory.check()
        assert engine.memory.free_slots == 6

@pytest.mark.skipif(importlib.util.find_spec('transformers') is None, reason='transformers comes with the parity extra')
@pytest.mark.parametrize('family', FAMILIES)
def test_embeddings_are_those_of_transformers(family):
    import torch, transformers
    ids = record(family)['ids'][:100].tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY/family, dtype=torch.float32)
    with torch.no_grad(): rows = model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    with loaded(family, SpecRunner()) as engine:
        for pooling, expected in (('mean', rows.mean(0)), ('last', rows[-1])):
            np.testing.assert_allclose(engine.embed(ids, pooling), expected / np.linalg.norm(expected), atol=2e-5)


@pytest.fixture(scope='module')
def server():
    def factory(report): return Engine(ToyRunner(vocab_size=260).load(max_context=400, num_slots=2), toy_tokenizer(), ChatTemplate(TEMPLATE), name='org/toy')
    with background_server(factory, ServeSettings(port=0, shutdown_seconds=0.5)) as state: yield state

def test_the_clients_read_the_same_vectors(server):
    with openai.OpenAI(base_url=server.url + '/v1', api_key='none') as client:
        theirs = client.embeddings.create(model='m', input=['one text', 'another'])            # asks for base64 by itself
        plain = client.embeddings.create(model='m', input=['one text', 'another'], encoding_format='float')
    assert [len(d.embedding) for d in theirs.data] == [32, 32] and theirs.usage.prompt_tokens == len('one text') + len('another')
    np.testing.assert_array_equal([d.embedding for d in theirs.data], np.float32([d.embedding for d in plain.data]))
    client = ollama.Client(server.url)
    np.testing.assert_allclose(client.embed('m', ['one text', 'another']).embeddings, [d.embedding for d in plain.data], rtol=1e-6)
    np.testing.assert_allclose(client.embeddings('m', 'another').embedding, plain.data[1].embedding, rtol=1e-6)
    assert len(client.embed('m', 'x', dimensions=4).embeddings[0]) == 4
    assert httpx.post(server.url + '/api/v0/embeddings', json=dict(input='another')).json()['data'][0]['embedding'] == plain.data[1].embedding

def test_many_at_once_are_all_answered(server):
    "One is read at a time, the others wait in their threads, and neither they nor an answer are lost"
    def ask(k):
        if k % 4 == 0: return httpx.post(server.url + '/v1/completions', json=dict(prompt=f'text {k}', max_tokens=20, temperature=0), timeout=60).status_code
        if k % 4 == 1: return httpx.post(server.url + '/v1/score', json=dict(prompt=f'text {k}', completion='and more'), timeout=60).status_code
        return httpx.post(server.url + '/v1/embeddings', json=dict(input=[f'text {k}'] * 3), timeout=60).status_code
    with ThreadPoolExecutor(16) as pool: assert list(pool.map(ask, range(48))) == [200] * 48
    server.engine.memory.check()
    assert server.engine.memory.free_slots == 2

def test_many_inputs_of_one_request(server):
    "The vectors of single requests, in order, in every API that takes several; texts that share steps, and a mistake in one of them"
    texts = [f'text {k} ' * (1 + 7 * k % 5) for k in range(40)]
    alone = [httpx.post(server.url + '/v1/embeddings', json=dict(input=t)).json()['data'][0]['embedding'] for t in texts]
    steps = server.engine.work['steps']
    reply = httpx.post(server.url + '/v1/embeddings', json=dict(input=texts)).json()
    assert [d['embedding'] for d in reply['data']] == alone and reply['usage']['prompt_tokens'] == sum(map(len, texts))
    assert server.engine.work['steps'] - steps < 30
    assert httpx.post(server.url + '/api/embed', json=dict(input=texts)).json()['embeddings'] == alone
    bad = httpx.post(server.url + '/v1/embeddings', json=dict(input=[*texts, 'x' * 401]))
    assert bad.status_code == 400 and bad.json()['error']['code'] == 'context_length_exceeded'

def test_others_go_on_beside_many_texts():
    "A single slot and a request of many texts: an answer comes in between them"
    runner = ToyRunner(vocab_size=260).load(max_context=400, num_slots=1)
    submit, runner.submit = runner.submit, lambda *a: time.sleep(0.002) or submit(*a)
    with background_server(lambda report: Engine(runner, toy_tokenizer()), ServeSettings(port=0, shutdown_seconds=0.5)) as state, ThreadPoolExecutor(1) as pool:
        many = pool.submit(lambda: httpx.post(state.url + '/v1/embeddings', json=dict(input=['a text'] * 1000), timeout=60))
        while not state.engine.work['steps']: time.sleep(0.005)
        assert httpx.post(state.url + '/v1/completions', json=dict(prompt='x', max_tokens=3), timeout=60).status_code == 200
        assert not many.done(), 'it waited for all texts'
        assert len(many.result().json()['data']) == 1000

def test_who_leaves_is_not_read_for():
    runner = ToyRunner(vocab_size=260).load(max_context=400)
    submit, runner.submit = runner.submit, lambda *a: time.sleep(0.02) or submit(*a)
    with background_server(lambda report: Engine(runner, toy_tokenizer()), ServeSettings(port=0, shutdown_seconds=0.5)) as state:
        with pytest.raises(httpx.ReadTimeout): httpx.post(state.url + '/v1/embeddings', json=dict(input=['x'] * 1000), timeout=0.3)
        time.sleep(0.3)
        steps = state.engine.work['steps']
        time.sleep(0.3)
        assert 0 < steps == state.engine.work['steps']

MISTAKES = {'/v1/score': (dict(prompt='x', completion='y'), [dict(prompt=None), dict(completion=None), dict(completion=5), dict(completion=''), dict(completion_token_ids=[1]), dict(messages=[]), dict(messages=[None]), dict(prompt=[1.5]), dict(prompt=['a']), dict(top_logprobs=21), dict(top_logprobs='2'), dict(completion='y' * 500), dict(max_seconds='x')]),
            '/v1/embeddings': (dict(input='x'), [dict(input=5), dict(input=[]), dict(input=''), dict(input=[None]), dict(input=[1, 'x']), dict(input=[999]), dict(input='x' * 500), dict(dimensions=99), dict(dimensions='9'), dict(encoding_format='x'), dict(encoding_format=5), dict(pooling='x'), dict(model=5)]),
            '/api/embed': (dict(input='x'), [dict(input=5), dict(input=[None]), dict(input=[['a']]), dict(truncate='x'), dict(input='x' * 500, truncate=False), dict(dimensions=99), dict(options=5), dict(options=dict(x=1)), dict(keep_alive='x')]),
            '/api/embeddings': (dict(prompt='x'), [dict(prompt=5), dict(options=5), dict(keep_alive='x'), dict(model=5)])}

@pytest.mark.parametrize('path', MISTAKES)
def test_mistakes_are_400_and_the_server_lives(server, path):
    fine, mistakes = MISTAKES[path]
    with httpx.Client(base_url=server.url) as http:
        for body in mistakes:
            reply = http.post(path, json=dict(fine, **body))
            assert reply.status_code == 400 and isinstance(reply.json()['error'], str if path.startswith('/api') else dict), (body, reply.text)
        for data in (b'', b'[', b'null', b'[' * 10**6): assert http.post(path, content=data).status_code == 400
        assert http.post(path, json=fine).status_code == 200

def test_a_runner_that_cannot_is_501():
    class Blind:
        def __init__(self): self.runner = ToyRunner(vocab_size=260).load(max_context=400)
        def __getattr__(self, name):
            if name == 'hidden': raise AttributeError(name)
            return getattr(self.runner, name)
    with background_server(lambda report: Engine(Blind(), toy_tokenizer()), ServeSettings(port=0, shutdown_seconds=0.5)) as state:
        reply = httpx.post(state.url + '/v1/embeddings', json=dict(input='x'))
        assert reply.status_code == 501 and reply.json()['error']['code'] == 'embeddings_unsupported'
        with pytest.raises(ollama.ResponseError) as e: ollama.Client(state.url).embed('m', 'x')
        assert e.value.status_code == 501
