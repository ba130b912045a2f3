"""Answers that must keep to rules: whatever the model says (here its logits are random), what comes out is valid, inside batches as alone.

With the real vocabulary of SmolLM2, whose tokens cut JSON in all kinds of ways, and models that are Python functions; at the end with the real model."""
import json, random, re, threading, time
import httpx, jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from sparkinfer.engine.engine import Engine
from sparkinfer.engine import grammar as grammar_module
from sparkinfer.engine.grammar import MOST_GIVEN_UP, Constraint, GrammarCompiler, tool_grammar
from sparkinfer.engine.request import EngineBusy, ErrorEvent, Grammar, ReasoningBudget, Request, SamplingParams
from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.formats.gguf import open_gguf
from sparkinfer.model_store import resolve
from sparkinfer.models.toy_runner import ToyRunner, toy_tokenizer
from sparkinfer.ops.sampling import unpack_mask
from sparkinfer.serve.app import ServeSettings, background_server
from sparkinfer.text.reasoning_tools import Markup, OutputParser
from sparkinfer.text.tokenizer import Tokenizer
from support import ScriptedRunner, TinyTokenizer, babble
from test_server_openai import build

@pytest.fixture(scope='module')
def tokenizer():
    with open_gguf(resolve('smollm2')) as file: return Tokenizer.from_gguf(file.metadata)

@pytest.fixture(scope='module')
def compiler(tokenizer): return GrammarCompiler(tokenizer)

@pytest.fixture(scope='module')
def script(tokenizer):
    "Random logits that depend on the whole history. Tokens that end strings and brackets are likelier, or no answer would ever end"
    ends = np.array([any(c in tokenizer.token_bytes(i) for c in b'"}]</') for i in range(tokenizer.vocab_size)])
    push = ends * 3.0 + np.isin(np.arange(tokenizer.vocab_size), list(tokenizer.eos_ids)) * 6
    return lambda history: np.random.default_rng([5, *history]).standard_normal(tokenizer.vocab_size, np.float32) * 3 + push

def engine_of(script, tokenizer, **kwargs):
    runner = {k: kwargs.pop(k) for k in ('gate', 'layer_kinds', 'num_slots', 'num_pages') if k in kwargs}
    return Engine(ScriptedRunner(script, tokenizer, **runner), tokenizer, **kwargs)

def walk(compiler, params, seed, most=400):
    "An answer drawn evenly from what is allowed, with the likelier ends: (text, 'end' or 'length')"
    constraint, r, ids, tokenizer, wish = compiler.rules(params).start(), random.Random(seed), [], compiler.tokenizer, []
    for _ in range(most):
        allowed = np.flatnonzero(unpack_mask(constraint.allowed(), tokenizer.vocab_size))
        assert len(allowed), tokenizer.decode(ids)
        if r.random() < .1: wish = tokenizer.encode('\n</parameter>')
        if wish and wish[0] in allowed: allowed = [wish.pop(0)]
        elif r.random() < .4: allowed = [i for i in allowed[:4000] if tokenizer.token_bytes(i)[:1] in b'"}]<\n' or i in tokenizer.eos_ids] or allowed
        token = int(r.choice(allowed))
        if token in tokenizer.eos_ids: return tokenizer.decode(ids), 'end'
        ids.append(token)
        constraint.accept(token)
        if constraint.finished: return tokenizer.decode(ids), 'end'
    return tokenizer.decode(ids), 'length'

SCHEMAS = {
    'object': {'type': 'object'},
    'flat': {'type': 'object', 'properties': {'name': {'type': 'string', 'maxLength': 12}, 'age': {'type': 'integer', 'minimum': 3, 'maximum': 150}, 'ok': {'type': ['boolean', 'null']}}, 'required': ['name', 'age', 'ok'], 'additionalProperties': False},
    'nested': {'type': 'object', 'properties': {'a': {'type': 'object', 'properties': {'b': {'type': 'array', 'items': {'enum': ['x', 'y', 'ü"', 3, None]}, 'minItems': 1, 'maxItems': 3}}, 'required': ['b'], 'additionalProperties': False}}, 'required': ['a'], 'additionalProperties': False},
    'list': {'type': 'array', 'prefixItems': [{'const': 'head'}, {'type': 'boolean'}], 'items': {'type': 'number', 'minimum': -1, 'exclusiveMaximum': 2.5}, 'minItems': 3, 'maxItems': 5},
    'choice': {'anyOf': [{'type': 'object', 'properties': {'kind': {'const': 'dot'}, 'x': {'type': 'integer', 'multipleOf': 7}}, 'required': ['kind', 'x'], 'additionalProperties': False}, {'type': 'string', 'pattern': '^[a-f]{2,5}$'}]},
    'tree': {'$defs': {'node': {'type': 'object', 'properties': {'v': {'type': 'boolean'}, 'next': {'anyOf': [{'type': 'null'}, {'$ref': '#/$defs/node'}]}}, 'required': ['v', 'next'], 'additionalProperties': False}}, '$ref': '#/$defs/node'},
    'map': {'type': 'object', 'patternProperties': {'^n[0-9]$': {'type': 'integer'}}, 'additionalProperties': False},
    'wide': {'type': 'object', 'properties': {f'p{i}': {'type': 'boolean'} for i in range(500)}, 'additionalProperties': False},
    'one of': {'oneOf': [{'type': 'integer', 'maximum': 99, 'minimum': 10}, {'type': 'boolean'}]},
    'all of': {'allOf': [{'type': 'object', 'properties': {'a': {'type': 'string', 'minLength': 2, 'maxLength': 6}}, 'required': ['a']}, {'properties': {'b': {'format': 'date', 'type': 'string'}}, 'required': ['b']}], 'additionalProperties': True},
}

@pytest.mark.parametrize('name', SCHEMAS)
def test_what_is_allowed_is_valid(compiler, name):
    params, ended = SamplingParams(grammar=Grammar('json_schema', SCHEMAS[name])), 0
    for seed in range(12):
        text, how = walk(compiler, params, f'{name}{seed}')
        if how == 'end':
            jsonschema.validate(json.loads(text), SCHEMAS[name], cls=jsonschema.Draft202012Validator)
            ended += 1
    assert ended >= 3

def schemas():
    "Random schemas of what is said to be enforced"
    bounds = lambda low, high: st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    plain = st.one_of(bounds(0, 6).map(lambda b: {'type': 'string', 'minLength': b[0], 'maxLength': b[1]}), bounds(-1000, 1000).map(lambda b: {'type': 'integer', 'minimum': b[0], 'maximum': b[1]}),
        st.tuples(st.floats(-99, 99).map(lambda x: round(x, 2)), st.integers(0, 9)).map(lambda x: {'type': 'number', 'minimum': x[0], 'exclusiveMaximum': x[0] + x[1] + .5}), st.integers(1, 40).map(lambda n: {'type': 'integer', 'multipleOf': n}),
        st.sampled_from([{'type': 'boolean'}, {'type': 'null'}, {'type': ['null', 'boolean']}, {'type': 'string', 'pattern': '^a|b{2}$'}, {'type': 'string', 'format': 'uuid'}]), st.lists(st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none()), min_size=1, max_size=4).map(lambda v: {'enum': v}))
    def inside(part):
        array = st.tuples(part, bounds(0, 3)).map(lambda x: {'type': 'array', 'items': x[0], 'minItems': x[1][0], 'maxItems': x[1][1]})
        names = st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=4)
        made = st.tuples(st.dictionaries(names, part, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3), st.one_of(st.just(False), part)).map(
            lambda x: {'type': 'object', 'properties': x[0], 'required': [n for n, r in zip(x[0], x[1]) if r], 'additionalProperties': x[2]})
        return st.one_of(array, made, st.lists(part, min_size=1, max_size=2).map(lambda parts: {'anyOf': parts}))
    return st.recursive(plain, inside, max_leaves=6)

@given(schema=schemas(), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_schema_is_kept_or_refused(compiler, schema, seed):
    try: text, how = walk(compiler, SamplingParams(grammar=Grammar('json_schema', schema)), seed, most=120)
    except RequestError: return
    if how == 'end': jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)

def test_the_toy_model_keeps_to_them_too():
    tokenizer = toy_tokenizer()
    with Engine(ToyRunner(vocab_size=260).load(max_context=256, num_slots=2), tokenizer) as engine:
        texts = [engine.submit(Request([n], SamplingParams(temperature=t, seed=n, max_tokens=40, grammar=Grammar('regex', '[ab]{3}(yes|no)')))).collect()[0].text for n in range(4) for t in (0, 1)]
    assert len(set(texts)) > 4 and all(re.fullmatch('[ab]{3}(yes|no)', text) for text in texts)

@pytest.mark.parametrize('layer_kinds', [('attention',), ('attention', 'delta')])
def test_batches_with_free_neighbours(tokenizer, script, layer_kinds):
    "Valid unless cut by length; the same tokens alone, in company and with so few pages that answers are thrown out and computed again; free answers say what they say without such neighbours"
    names = ['flat', 'nested', 'choice', 'one of']
    asked = [SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=n, max_tokens=48, n=1 + n % 2, grammar=Grammar('json_schema', SCHEMAS[name])) for n, name in enumerate(names)]
    free = [SamplingParams(temperature=t, seed=n, max_tokens=60, ignore_eos=True) for n, t in enumerate((0, 1))]          # long enough that pages run out
    prompts = [[40 + n] * (9 + 12 * n) for n in range(len(asked) + len(free))]
    tokens = lambda answers: [a.token_ids for a in answers]
    with engine_of(script, tokenizer, layer_kinds=layer_kinds) as engine: alone = [engine.submit(Request(p, q)).collect() for p, q in zip(prompts, asked + free)]
    for settings in (dict(num_slots=8), dict(num_slots=4, num_pages=10, step_rows=7)):
        with engine_of(script, tokenizer, layer_kinds=layer_kinds, **settings) as engine:
            streams = [engine.submit(Request(p, q)) for p, q in zip(prompts, asked + free)]
            assert [tokens(s.collect()) for s in streams] == [tokens(a) for a in alone]
            engine.call(engine.memory.check)
            assert engine.memory.stats()['held_pages'] == 0 and ('num_pages' not in settings or engine.work['preempted'])
    ended = [(json.loads(a.text), name) for answers, name in zip(alone, names) for a in answers if a.reason == 'stop']
    for value, name in ended: jsonschema.validate(value, SCHEMAS[name], cls=jsonschema.Draft202012Validator)
    assert len(ended) >= 3 and all(a.reason in ('stop', 'length') for answers in alone for a in answers)

def test_greedy_keeps_to_the_rules_too(tokenizer, script):
    with engine_of(script, tokenizer) as engine:
        for n in range(3):
            answer, = engine.submit(Request([n + 1], SamplingParams(temperature=0, max_tokens=60, logprobs=1, grammar=Grammar('json_schema', SCHEMAS['flat'])))).collect()
            if answer.reason == 'stop': jsonschema.validate(json.loads(answer.text), SCHEMAS['flat'])
            assert any(l.top[0][0] != l.token_id for l in answer.logprobs)      # the model wanted something else, and its log-probabilities say so

def test_the_end_is_allowed_exactly_where_the_rules_may_end(compiler, tokenizer):
    ends = sorted(tokenizer.eos_ids)
    constraint = compiler.rules(SamplingParams(grammar=Grammar('regex', 'a{2,4}'))).start()
    for said in range(4):
        bits = unpack_mask(constraint.allowed(), tokenizer.vocab_size)
        assert bits[ends].all() == bits[ends].any() == (said >= 2)
        constraint.accept(tokenizer.encode('a')[0])
    assert constraint.finished
    constraint = compiler.rules(SamplingParams(ignore_eos=True, grammar=Grammar('regex', 'a{2,4}'))).start()
    for said in range(4):
        assert not unpack_mask(constraint.allowed(), tokenizer.vocab_size)[ends].any()
        constraint.accept(tokenizer.encode('a')[0])
    assert constraint.finished

def test_stop_strings_and_stop_ids_still_stop(tokenizer, script):
    with engine_of(script, tokenizer) as engine:
        ask = lambda **knobs: engine.submit(Request([3], SamplingParams(temperature=1, seed=2, max_tokens=60, grammar=Grammar('regex', '[ab]{20}'), **knobs))).collect()[0]
        whole = ask()
        assert (whole.reason, whole.stop, len(whole.text)) == ('stop', None, 20)
        assert ask(stop='b').text == whole.text.split('b')[0] and ask(stop='b').stop == 'b'
        cut = ask(stop_token_ids=[whole.token_ids[3]])
        assert (cut.stop, cut.token_ids) == (whole.token_ids[3], whole.token_ids[:whole.token_ids.index(whole.token_ids[3])])

BAD = {
    'json_schema': ['{', '3', 'false', '{"type": "strin"}', '{"not": {}}', '{"if": {}, "then": {}}', '{"uniqueItems": true}', '{"type": "string", "pattern": "("}', '{"type": "string", "pattern": "(?=a)b"}', '{"$ref": "#/nope"}', '{"$ref": "http://x/y"}',
                    '{"enum": []}', '{"type": "integer", "minimum": 5, "maximum": 3}', '{"type": "object", "minProperties": 2}', '{"x-guidance": {"lenient": true}, "not": {}}', '{"oneOf": [{"type": "string"}, {"maxLength": 3}]}', '{"$ref": "#"}'],
    'regex': ['(', 'a{2,1}', '(?=a)b', r'[^\s\S]'], 'lark': ['start', 'start: nope'], 'gbnf': ['root ::= ', 'root = "a"'],
}

@pytest.mark.parametrize('kind,source', [(kind, source) for kind, sources in BAD.items() for source in sources])
def test_what_cannot_be_enforced_is_refused(compiler, kind, source):
    for _ in range(2):                                                          # the second time from the cache
        with pytest.raises(RequestError) as caught: compiler.compile(Grammar(kind, source))
        assert caught.value.param == 'response_format' and '\n' not in str(caught.value) and len(str(caught.value)) < 500

def hostile():
    chain = lambda n, link: {'$defs': {f'd{i}': link(f'#/$defs/d{i + 1}') for i in range(n)} | {f'd{n}': {'type': 'string'}}, '$ref': '#/$defs/d0'}
    deep = {}
    for _ in range(400): deep = {'items': deep}
    yield 'multiples', {'multipleOf': 99991, 'type': 'integer'}
    yield 'many properties', {'type': 'object', 'properties': {f'p{i}': {} for i in range(5000)}}
    yield 'deep', deep
    for n in (400, 5000):
        yield f'references {n}', chain(n, lambda to: {'$ref': to})
        yield f'references in objects {n}', chain(n, lambda to: {'type': 'object', 'properties': {'a': {'$ref': to}}})
        yield f'references in choices {n}', chain(n, lambda to: {'anyOf': [{'$ref': to}, {'type': 'integer'}]})
    yield 'choices of choices', {'allOf': [{'anyOf': [{'properties': {f'p{i}{j}': {'type': 'integer'}}} for j in range(2)]} for i in range(16)]}
    yield 'long strings', {'type': 'string', 'minLength': 10**6, 'maxLength': 10**9}
    yield 'long lists', {'type': 'array', 'minItems': 10**6, 'items': {'type': 'array', 'maxItems': 10**5}}
    yield 'nested repeats', {'type': 'string', 'pattern': '^(((a{1,1000}){1,1000}){1,1000})$'}
    yield 'an automaton that explodes', {'type': 'string', 'pattern': '^(a|b)*a(a|b){40}$'}
    yield 'many values', {'enum': [f'value {i}' for i in range(9000)]}

@pytest.mark.parametrize('name,schema', [*hostile()])
def test_hostile_schemas_are_over_soon(compiler, name, schema):
    "Compiled or refused, the process alive, and the first masks soon there"
    try: grammar = Grammar('json_schema', schema)
    except RequestError: return
    used = time.process_time()
    try: rules = compiler.rules(SamplingParams(grammar=grammar))
    except RequestError: rules = None
    assert time.process_time() - used < 8
    if rules is None: return
    constraint, used = rules.start(), time.process_time()
    for token in [None, *compiler.tokenizer.encode('{"ab')]:
        if token is not None and not unpack_mask(constraint.allowed(), compiler.tokenizer.vocab_size)[token]: break
        if token is not None: constraint.accept(token)
        constraint.allowed()
    assert time.process_time() - used < 3

@pytest.mark.parametrize('source', ['start: r0\n' + ''.join(f'r{i}: r{i + 1} | "a"\n' for i in range(n)) + f'r{n}: "x"' for n in (400, 9000)] + ['{"grammars": [{"lark_grammar": ' + json.dumps('start: r0\n' + ''.join(f'r{i}: r{i + 1} | "a"\n' for i in range(9000)) + 'r9000: "x"') + '}]}',
    'start: %json ' + json.dumps({'$defs': {f'd{i}': {'$ref': f'#/$defs/d{i + 1}'} for i in range(4000)} | {'d4000': {}}, '$ref': '#/$defs/d0'}), 'start: %json {"type": "integer", "multipleOf": 999999937}'] + ['start: ' + '(' * 90_000 + '"a"' + ')' * 90_000])
def test_hostile_grammars_are_over_soon(compiler, source):
    try: compiler.rules(SamplingParams(grammar=Grammar('lark', source))).start().allowed()
    except RequestError: pass

BOMB = {'type': 'number', 'multipleOf': 9999991}
HIDDEN = {'no keyword': {'$ref': '#/foo/bar', 'foo': {'bar': BOMB}}, 'a default': {'$ref': '#/default', 'default': BOMB}, 'an example': {'$ref': '#/examples/0', 'examples': [BOMB]},
    'a value': {'$ref': '#/enum/0', 'enum': [BOMB]}, 'spelled otherwise': {'$ref': '#/f%6fo', 'foo': BOMB}, 'beside the definitions': {'$ref': '#/$defs/a/x', '$defs': {'a': {'x': BOMB}}},
    'through another one': {'$ref': '#/$defs/a', '$defs': {'a': {'$ref': '#/x'}}, 'x': BOMB}, 'a nested id': {'$ref': '#/$defs/a', '$defs': {'a': {'$id': 'http://x/', '$ref': '#/x', 'x': BOMB}}},
    'an anchor': {'$ref': '#a', 'x': {'$anchor': 'a', **BOMB}}, 'its own address': {'$id': 'http://x/', '$ref': 'http://x/#/x', 'x': BOMB},
    'where it may stand': {'$ref': '#/$defs/a', '$defs': {'a': BOMB}}, 'both at once': {'allOf': [{'type': 'integer', 'multipleOf': 1999}, {'multipleOf': 1997}, {'multipleOf': 1993}]}}

@pytest.mark.parametrize('name', HIDDEN)
def test_no_reference_gets_around_the_bounds(compiler, name):
    "Wherever it stands: a compilation of these takes minutes and gigabytes"
    for grammar in (Grammar('json_schema', HIDDEN[name]), tool_grammar([{'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', 'properties': {'p': {'type': 'object'}}, **HIDDEN[name]}}}], 'required', True, Markup('', '', 'hermes'))):
        used = time.process_time()
        with pytest.raises(RequestError, match=r"\$ref|multipleOf|\$id"): compiler.compile(grammar)
        assert time.process_time() - used < 1

def test_references_that_people_write(compiler):
    "By name, escaped, to a property, to a place in a list, to the whole, to `true`"
    for schema in ({'$ref': '#/$defs/a%20b', '$defs': {'a b': {'type': 'null'}}}, {'$ref': '#/definitions/a~1b', 'definitions': {'a/b': {'type': 'null'}}}, {'$ref': '#/$defs/x', '$defs': {'x': True}},
                   {'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'$ref': '#/properties/a'}}}, {'anyOf': [{'type': 'null'}, {'type': 'array', 'items': {'$ref': '#/anyOf/0'}}]},
                   {'type': 'object', 'properties': {'next': {'anyOf': [{'type': 'null'}, {'$ref': '#'}]}}}, {'$id': 'http://x/y', '$ref': '#/$defs/a', '$defs': {'a': {'type': 'boolean'}}}): compiler.compile(Grammar('json_schema', schema))

VALUES = [None, True, False, 0, 3, -1, 1.5, 1e308, 1 << 60, 1 << 70, '', 'x', '#', '#/', '[', [], {}, [3], ['a'], [None], [{}], [[]], [True], {'a': 3}, {'a': None}, {'a': []}, {'a': {}}, {'a': True}, 'object', ['string', 'object'], float('inf'), float('nan'), '\ud800']
KEYWORDS = sorted(grammar_module._SHAPE_OF.keys() | {'const', 'default', 'title', 'description', 'examples', 'dependentRequired', 'dependencies', '$dynamicRef', '$schema', 'id', 'contentSchema', 'x-guidance', 'nullable'})

@given(key=st.sampled_from(KEYWORDS), value=st.sampled_from(VALUES), form=st.sampled_from(['schema', 'part', 'hermes', 'qwen_xml']),
       base=st.sampled_from([{}, {'type': 'object', 'properties': {'a': {}}}, {'type': 'string'}, {'type': 'number'}, {'type': 'array', 'items': {'type': 'integer'}}]))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_of_the_wrong_type_are_refused_or_mean_nothing(compiler, key, value, form, base):
    "At every keyword: a grammar or a RequestError, and no other exception"
    schema = {**base, key: value}
    if form != 'schema': schema = {'type': 'object', 'properties': {'p': schema}, 'required': ['p']}
    try: compiler.compile(Grammar('json_schema', schema) if form in ('schema', 'part') else tool_grammar([{'type': 'function', 'function': {'name': 'f', 'parameters': schema}}], 'required', True, Markup('', '', form)))
    except RequestError: pass

@pytest.mark.parametrize('schema', [{'properties': 3}, {'properties': True}, {'patternProperties': []}, {'required': 'a'}, {'required': [3]}, {'enum': 'a'}, {'anyOf': {}}, {'allOf': [3]}, {'$defs': 3}, {'$defs': {'a': 3}}, {'items': 3},
    {'$ref': 3}, {'format': 3}, {'pattern': 3}, {'type': 3}, {'maxLength': -1}, {'minItems': 1.5}, {'minimum': '3'}, {'maximum': True}, {'multipleOf': 'a'}, {'multipleOf': 0}])
def test_the_keyword_of_the_wrong_type_is_named(compiler, schema):
    with pytest.raises(RequestError, match=next(iter(schema)).replace('$', '.')): compiler.compile(Grammar('json_schema', {'properties': {'p': schema}}))

def can_say(compiler, schema, value):
    "Whether an answer may be just this value"
    matcher = compiler.compile(Grammar('json_schema', schema)).deep_copy()
    return bool(matcher.consume_tokens(compiler.tokenizer.encode(value if isinstance(value, str) else json.dumps(value)))) and matcher.is_accepting()

INT64 = {'minimum': -2**63, 'maximum': 2**63 - 1}

@pytest.mark.parametrize('schema', [{'type': 'integer', **INT64}, {'type': ['integer', 'null'], **INT64}, {'type': 'number', **INT64}, INT64, {'type': 'integer', 'minimum': 0, 'maximum': 2**64 - 1}, {'type': 'number', 'maximum': 1e308, 'minimum': -1e308},
    {'type': 'integer', 'exclusiveMinimum': -2**63 - 1, 'exclusiveMaximum': 2**63}, {'type': 'integer', 'maximum': 10**400}, {'type': 'integer', 'multipleOf': 2, **INT64}], ids=json.dumps)
def test_bounds_of_a_type_are_taken(compiler, schema):
    "They stand in schemas that were made from programs, where nobody meant a bound"
    for value in (0, 2, 2**53, 2**62): assert can_say(compiler, schema, value)
    if schema.get('minimum', -1) < 0: assert can_say(compiler, schema, -2**62) and can_say(compiler, schema, -2**63 + 1024 if 'minimum' in schema or 'exclusiveMinimum' in schema else -10**30)
    if 10**400 != schema.get('maximum') and 'maximum' in schema and schema.get('type') != 'number' and 'type' in schema: assert not can_say(compiler, schema, 2**64)

@pytest.mark.parametrize('bound', [2**53 + 1, -2**53 - 1, 2**56 + 3, -2**60 - 1, 10**17 + 1, 2**62 - 1, 2**63 - 1, 2**63 - 1000, -2**63, -2**63 + 1])
def test_bounds_beyond_doubles_are_kept(compiler, bound):
    "The fault: 2^53 + 1 is 2^53 in float64, and an answer that the schema forbids gets through. No number at the edge may, nearly all inside can"
    for upper in (True, False):
        if (bound > 10**17) != upper and abs(bound) > 10**17: continue                        # with the other bound open the library has no words for it: refused
        schema = {'type': 'integer', 'maximum' if upper else 'minimum': bound}
        inside = -1 if upper else 1
        for step in (1, 2, 5, 1024, 10**6): assert not can_say(compiler, schema, bound - inside * step), step
        for step in (2048, 4096, 10**6): assert can_say(compiler, schema, bound + inside * step), step

def test_bounds_that_cannot_be_kept_are_refused(compiler):
    for schema in ({'minimum': 2**63}, {'minimum': 10**400}, {'maximum': -2**64}, {'minimum': 10**18}, {'minimum': 5, 'maximum': 4}):
        with pytest.raises(RequestError): compiler.compile(Grammar('json_schema', {'type': 'integer', **schema}))

def test_names_and_addresses_are_followed(compiler):
    "Anchors, addresses and those of bundled documents: each reference means what it means by the standard"
    leaf = lambda **more: {'type': 'integer', **more}
    for schema in ({'$ref': '#n', '$defs': {'a': leaf(**{'$anchor': 'n'})}}, {'$schema': 'http://json-schema.org/draft-07/schema#', '$ref': '#n', 'definitions': {'a': leaf(**{'$id': '#n'})}}, {'$id': 'https://x.org/s.json', '$ref': 'https://x.org/s.json#/$defs/a', '$defs': {'a': leaf()}},
                   {'$id': 'https://x.org/s.json', '$ref': 'other.json', '$defs': {'a': leaf(**{'$id': 'https://x.org/other.json'})}}, {'$id': 'urn:x:s', '$ref': 'urn:x:s#n', '$defs': {'a/b %': leaf(**{'$anchor': 'n'})}},
                   {'$ref': 'o#/$defs/b', '$defs': {'b': {'type': 'string'}, 'a': {'$id': 'o', '$defs': {'b': leaf()}}}}):
        jsonschema.validate(5, schema)
        assert can_say(compiler, schema, 5) and not can_say(compiler, schema, '"5"'), schema
    node = {'$anchor': 'node', 'type': 'object', 'properties': {'next': {'anyOf': [{'type': 'null'}, {'$ref': '#node'}]}}, 'required': ['next'], 'additionalProperties': False}
    assert can_say(compiler, node, {'next': {'next': {'next': None}}}) and not can_say(compiler, node, {'next': {'next': 1}})
    for bad in ({'$ref': '#m', '$defs': {'a': {'$anchor': 'n'}}}, {'$ref': 'https://x.org/else'}, {'anyOf': [{'$anchor': 'n'}, {'$anchor': 'n'}]}):
        with pytest.raises(RequestError, match='cannot be followed|two parts'): compiler.compile(Grammar('json_schema', bad))

def test_schemas_inside_of_rules(compiler):
    "Behind %json, with all that schemas may have; the word alone is none"
    walked = lambda source: walk(compiler, SamplingParams(grammar=Grammar('lark', source)), 3)[0]
    source = 'start: "%json: " /%json{2}/ " " value\nvalue: %json {\n  "$ref": "#n",\n  "$defs": {"a": {"$anchor": "n", "type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 60}}}\n'
    said = walked(source)
    assert said.startswith('%json: %jsonn ') and int(said.split()[-1]) % 7 == 0
    for bad, words in (('%json {"multipleOf": 99991}', 'multipleOf'), ('%json {"$ref": "#/x", "x": {}}', 'no schema'), ('%json {', 'not JSON'), ('%json {"uniqueItems": true}', 'uniqueItems'), ('%json {"multiple\\u004ff": 99991}', 'multipleOf')):
        with pytest.raises(RequestError, match=words): compiler.compile(Grammar('lark', 'start: ' + bad))

@pytest.mark.parametrize('kind,source', [('regex', 'a{1000000}'), ('lark', 'start: "a"{100000000}'), ('json_schema', {'allOf': [{'type': 'object', 'properties': {f'p{j}_{i}': {'type': 'string'} for i in range(400)}} for j in range(10)]})])
def test_what_breaks_at_its_first_token_is_refused(compiler, kind, source):
    with pytest.raises(RequestError, match='too complex'): compiler.compile(Grammar(kind, source))

def test_reasons_in_plain_words(compiler):
    for kind, source, why in (('json_schema', {'$ref': '#'}, 'lead only to itself'), ('gbnf', 'root ::= ', 'only an empty answer'), ('regex', r'[^\s\S]', 'no text at all')):
        with pytest.raises(RequestError, match=why) as caught: compiler.compile(Grammar(kind, source))
        assert 'NoExtension' not in str(caught.value)

@pytest.mark.parametrize('source', ['start: s\ns: s s | s s s | /[a-z ]/ | ', 'start: s\ns: s s s | /[a-z]/'])
def test_rules_that_take_ever_longer_end_as_the_fault_of_their_request(tokenizer, source):
    "Letters that can be read in many ways: a mask would take seconds; the neighbour says what it says alone"
    script = lambda history: np.random.default_rng([7, *history]).standard_normal(tokenizer.vocab_size, np.float32)
    with engine_of(script, tokenizer) as engine:
        free, bad = SamplingParams(temperature=1, seed=3, max_tokens=30), SamplingParams(temperature=1, seed=4, top_k=0, top_p=1, min_p=0, max_tokens=300, ignore_eos=True, grammar=Grammar('lark', source))
        want, used = engine.submit(Request([1], free)).collect()[0].token_ids, time.process_time()
        stream, neighbour = engine.submit(Request([2], bad)), engine.submit(Request([1], free))
        with pytest.raises(RequestError, match='broken off: the grammar is too complex') as caught: stream.collect()
        assert caught.value.param == 'response_format' and neighbour.collect()[0].token_ids == want
        assert time.process_time() - used < 8 and engine.health().ok

def test_a_token_that_the_grammar_does_not_allow_is_our_fault(compiler, tokenizer):
    constraint = compiler.rules(SamplingParams(grammar=Grammar('regex', 'ab'))).start()
    with pytest.raises(SparkinferError, match='was drawn') as caught: constraint.accept(tokenizer.encode('x')[0])
    assert not isinstance(caught.value, RequestError)

def test_compilations_that_hang_do_not_keep_others_out(tokenizer, monkeypatch):
    "They give their places back; if many hang, requests are refused at once and do not wait"
    compiler, real, go = GrammarCompiler(tokenizer), GrammarCompiler._compile, threading.Event()
    monkeypatch.setattr(GrammarCompiler, '_compile', lambda self, grammar: go.wait(60) and RequestError('released') if 'hang' in grammar.source else real(self, grammar))
    monkeypatch.setattr(grammar_module.in_bounds, '__defaults__', (.1, .5))
    compiler.load()
    try:
        for n in range(MOST_GIVEN_UP):
            compiler.compile(Grammar('regex', f'fine{n}'))
            with pytest.raises(RequestError, match='more than'): compiler.compile(Grammar('regex', f'hang{n}'))
        began = time.perf_counter()
        with pytest.raises(EngineBusy): compiler.compile(Grammar('regex', 'fine too'))
        assert time.perf_counter() - began < .3
        compiler.compile(Grammar('regex', 'fine0'))                             # what is known needs nobody
    finally: go.set()
    with grammar_module._compilers.changed: assert grammar_module._compilers.changed.wait_for(lambda: not grammar_module._compilers.given_up, 10)
    compiler.compile(Grammar('regex', 'fine again'))

def test_a_flood_of_slow_grammars_leaves_the_server_to_others(monkeypatch):
    "Forty requests whose grammars hang: most are refused at once, and a plain request and a known grammar are answered meanwhile"
    go, real, words = threading.Event(), GrammarCompiler._compile, dict(messages=[dict(role='user', content='greet')], max_tokens=8)
    monkeypatch.setattr(GrammarCompiler, '_compile', lambda self, grammar: go.wait(60) and RequestError('released') if 'hang' in grammar.source else real(self, grammar))
    with background_server(build, ServeSettings(port=0, shutdown_seconds=.5)) as state, httpx.Client(base_url=state.url, timeout=30) as http:
        ask = lambda **more: http.post('/v1/chat/completions', json=dict(words, **more)).status_code
        assert ask(guided_regex='[a-z]+') == 200
        answers = []
        threads = [threading.Thread(target=lambda n=n: answers.append(ask(guided_regex=f'hang{n}'))) for n in range(40)]
        for t in threads: t.start()
        try:
            began = time.perf_counter()
            while len(answers) < 30: assert time.perf_counter() - began < 5; time.sleep(.01)
            assert not go.is_set() and set(answers) == {429} and ask() == 200 and ask(guided_regex='[a-z]+') == 200
            assert time.perf_counter() - began < 5
        finally:
            go.set()
            for t in threads: t.join()

def test_white_space_is_that_of_json_on_one_line_or_many(compiler, tokenizer):
    def fits(text):
        constraint = compiler.rules(SamplingParams(grammar=Grammar('json_object'))).start()
        for token in tokenizer.encode(text):
            if not unpack_mask(constraint.allowed(), tokenizer.vocab_size)[token]: return False
            constraint.accept(token)
        return True
    value = {'a': [1, {'b': 'c  d'}], 'e': {'f': [], 'g': {'h': [True]}}}
    for said in (json.dumps(value), json.dumps(value, separators=(',', ':')), *(json.dumps(value, indent=n) for n in (1, 2, 3))): assert fits(said), said
    for said in ('{  "a": 1}', '{\r\n"a": 1}', '{\n\n"a": 1}', '{"a":  1}', '{\n' + ' ' * 30 + '"a": 1}'): assert not fits(said), said

def test_a_fault_in_a_matcher_ends_its_request_only(tokenizer, script, monkeypatch):
    grammar, asked = Grammar('regex', '[ab]{30}'), dict(temperature=1, seed=4, max_tokens=12)
    with engine_of(script, tokenizer) as engine: want = [engine.submit(Request([n], SamplingParams(**asked, grammar=g))).collect()[0].token_ids for n, g in ((2, grammar), (3, None))]
    for name, at in (('allowed', 3), ('accept', 4)):
        real, calls = getattr(Constraint, name), []
        def broken(self, *args):
            if getattr(self, 'rules').grammar.source == '[ab]{31}':
                calls.append(1)
                if len(calls) > at: raise ZeroDivisionError('in a matcher')
            return real(self, *args)
        monkeypatch.setattr(Constraint, name, broken)
        with engine_of(script, tokenizer) as engine:
            bad = engine.submit(Request([1], SamplingParams(**asked, grammar=Grammar('regex', '[ab]{31}'))))
            good = [engine.submit(Request([n], SamplingParams(**asked, grammar=g))) for n, g in ((2, grammar), (3, None))]
            with pytest.raises(ZeroDivisionError, match='in a matcher'): bad.collect()
            assert [s.collect()[0].token_ids for s in good] == want
            assert engine.health().ok and engine.health().failed == 1 and engine.memory.stats()['held_pages'] == 0
        monkeypatch.undo()

def test_rules_that_leave_no_token_end_the_request(tokenizer, script, monkeypatch):
    monkeypatch.setattr(Constraint, 'allowed', lambda self: np.zeros(self.rules.compiler.words, np.uint32))
    with engine_of(script, tokenizer) as engine:
        events = list(engine.submit(Request([1], SamplingParams(grammar=Grammar('json_object')))))
        assert isinstance(events[-1], ErrorEvent) and 'every token' in str(events[-1].error)

def test_cancel_in_the_middle(tokenizer, script):
    with engine_of(script, tokenizer, gate=lambda batch: time.sleep(.01)) as engine:
        stream = engine.submit(Request([1], SamplingParams(temperature=1, max_tokens=300, grammar=Grammar('regex', '[ab]{400}'))))
        next(stream); stream.cancel()
        assert list(stream)[-1].reason == 'cancelled' and engine.health().active == 0

def test_many_threads_compile_at_once(tokenizer):
    compiler, out = GrammarCompiler(tokenizer), []
    work = lambda n: out.append(compiler.compile(Grammar('regex', f'a{{{n % 3 + 1}}}')))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(9)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(out) == 9 and not any(m.is_error() for m in out)


# reasoning

THINK = {'one token': ((257,), (258,)), 'bytes': (tuple(b'<think>'), tuple(b'</think>'))}

def thinking_tokenizer(): return TinyTokenizer('>{', 'think>', '</', '\n\n', '>\n')

@pytest.mark.parametrize('marks', THINK)
@pytest.mark.parametrize('opened', [True, False])
def test_reasoning_is_counted_and_cut(marks, opened):
    "For budgets of 0, 1, 5 and none: at most that many tokens, then the mark, then what keeps to the rules. A closing mark that the model writes itself counts as well, however it is cut"
    tokenizer = thinking_tokenizer()
    start, close = THINK[marks]
    text = b''.join(tokenizer.token_bytes(i) for i in close)
    begin = b''.join(tokenizer.token_bytes(i) for i in start)
    for budget in (0, 1, 5, None):
        reasoning = ReasoningBudget(budget, close, opened, () if opened else start)
        for grammar in (None, Grammar('regex', '[ab]{3}', after=close)):
            compiler = GrammarCompiler(tokenizer)
            for seed in range(25):
                r, constraint, ids = random.Random(f'{seed}{budget}{marks}'), compiler.rules(SamplingParams(grammar=grammar, reasoning=reasoning)).start(), []
                wish = [] if opened else list(start)                            # what the model wants to say: some thoughts, the mark in some spelling, more
                wish += [r.randrange(97, 123) for _ in range(r.randrange(9))] + r.choice([list(close), tokenizer.encode(text.decode()) if text[:2] != b'<|' else list(close)]) + [97] * 9
                for token in wish:
                    mask = constraint.allowed()
                    bits = unpack_mask(mask, tokenizer.vocab_size) if len(mask) else np.ones(tokenizer.vocab_size, bool)
                    if not bits[token]: token = int(r.choice(np.flatnonzero(bits)))
                    ids.append(token)
                    constraint.accept(token)
                    if constraint.finished: break
                said = b''.join(tokenizer.token_bytes(i) for i in ids)
                if not opened: assert said.startswith(begin); said = said[len(begin):]
                thought, mark, rest = said.partition(text)
                assert constraint.reasoning_tokens <= (99 if budget is None else budget) and (mark or budget is None)
                if grammar is not None and mark: assert rest.strip(b'\n') in (b'aaa', b'aa', b'a', b'') or set(rest.strip(b'\n')) <= set(b'ab')
                if grammar is not None and constraint.finished: assert len(rest.lstrip(b'\n')) == 3
                if len(tokenizer.encode(thought.decode())) == len(thought): assert constraint.reasoning_tokens == len(thought)

def test_an_answer_that_does_not_begin_with_reasoning(compiler, tokenizer):
    close, begin = tuple(tokenizer.encode('</think>')), tuple(tokenizer.encode('<think>'))
    constraint = compiler.rules(SamplingParams(grammar=Grammar('regex', 'yes', after=close), reasoning=ReasoningBudget(3, close, False, begin))).start()
    for token in tokenizer.encode('yes'):
        assert unpack_mask(constraint.allowed(), tokenizer.vocab_size)[token]
        constraint.accept(token)
    assert constraint.finished and constraint.reasoning_tokens == 0

def test_no_token_reaches_over_the_mark_and_none_ends_before_it():
    tokenizer = thinking_tokenizer()
    close = tuple(b'</think>')
    constraint = GrammarCompiler(tokenizer).rules(SamplingParams(grammar=Grammar('regex', r'\{[ab]\}', after=close))).start()
    over, end = tokenizer.encode('>{')[0], 256
    for token in b'x</think':
        bits = unpack_mask(constraint.allowed(), tokenizer.vocab_size)
        assert bits[token] and bits[over] and not bits[end]
        constraint.accept(token)
    assert not unpack_mask(constraint.allowed(), tokenizer.vocab_size)[over]
    constraint.accept(ord('>'))
    assert set(np.flatnonzero(unpack_mask(constraint.allowed(), tokenizer.vocab_size))) == {ord('{'), ord('\n'), tokenizer.encode('\n\n')[0]}

def test_usage_through_the_engine():
    tokenizer = thinking_tokenizer()
    close = tuple(b'</think>')
    with engine_of(babble(tokenizer.vocab_size), tokenizer) as engine:
        ask = lambda **knobs: engine.submit(Request([1, 2], SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True, **knobs))).collect()[0]
        plain, cut = ask(), ask(reasoning=ReasoningBudget(6, close))
        assert cut.token_ids[:6] == plain.token_ids[:6] and tuple(cut.token_ids[6:14]) == close
        assert (cut.usage.reasoning_tokens, cut.usage.completion_tokens, plain.usage.reasoning_tokens) == (6, 40, 0)
        assert ask(reasoning=ReasoningBudget(None, close)).token_ids == plain.token_ids                  # only counted: the same answer
        with pytest.raises(RequestError, match='reasoning'): engine.check(Request([1], SamplingParams(reasoning=ReasoningBudget(1, (99_999,)))))


# calls of tools

TOOLS = [{'type': 'function', 'function': f} for f in (
    {'name': 'sky', 'parameters': {'type': 'object', 'properties': {'at': {'type': 'string', 'maxLength': 9}, 'days': {'type': 'integer', 'minimum': 1, 'maximum': 14}, 'unit': {'enum': ['C', 'F', 'true']}}, 'required': ['at', 'unit']}},
    {'name': 'now', 'parameters': {'type': 'object', 'properties': {}}},
    {'name': 'file_it', 'parameters': {'type': 'object', '$defs': {'tag': {'enum': ['red', 'blue']}, 'code': {'type': 'string', 'pattern': '^[a-f]{2,4}$'}},
        'properties': {'tags': {'type': 'array', 'items': {'$ref': '#/$defs/tag'}, 'maxItems': 2}, 'code': {'$ref': '#/$defs/code'}, 'note': {'type': ['string', 'null']}, 'sure': {'type': 'boolean'}, 'what': {}}, 'required': ['tags', 'code', 'sure']}},
    {'name': 'bare'})]

@pytest.mark.parametrize('form', ['hermes', 'qwen_xml'])
@pytest.mark.parametrize('choice', ['required', {'name': 'file_it'}])
@pytest.mark.parametrize('parallel', [True, False])
def test_required_calls_are_calls_that_keep_to_the_schema(compiler, form, choice, parallel):
    "Random walks, read by the server's own parser"
    markup, ended, named = Markup('<think>', '</think>', form), 0, set()
    params = SamplingParams(grammar=tool_grammar(TOOLS, choice, parallel, markup))
    schemas = {t['function']['name']: t['function'].get('parameters', {}) for t in TOOLS}
    for seed in range(14):
        text, how = walk(compiler, params, f'{form}{choice}{parallel}{seed}', most=250)
        parser = OutputParser(markup, tools=TOOLS)
        pieces = parser.push(text) + parser.finish(cut=how == 'length')
        assert how == 'length' or not any(p.kind in ('content', 'reasoning') and p.text.strip() for p in pieces), text
        calls = [c for c in parser.calls if c[2]]
        for name, arguments, _ in calls: jsonschema.validate(json.loads(arguments), schemas[name], cls=jsonschema.Draft202012Validator)
        if how == 'end':
            assert parser.calls and all(c[2] for c in parser.calls) and (parallel or len(parser.calls) == 1), text
            ended, named = ended + 1, named | {name for name, _, _ in calls}
    assert ended >= 3 and (named == {'file_it'} if isinstance(choice, dict) else len(named) > 1)

def test_tools_that_cannot_be_enforced(compiler):
    def refusal(parameters, form, name='f'):
        grammar = tool_grammar([{'type': 'function', 'function': {'name': name, 'parameters': parameters}}], 'required', True, Markup('', '', form))
        with pytest.raises(RequestError) as caught: compiler.compile(grammar)
        assert caught.value.param == 'tools'
        return str(caught.value)
    prop = lambda **schema: {'type': 'object', 'properties': {'p': schema}}
    for form in ('hermes', 'qwen_xml'):
        assert "'f'" in refusal({'type': 'array'}, form)
        refusal(prop(type='array', uniqueItems=True), form)
        refusal({'type': 'object', 'dependentRequired': {'a': ['b']}}, form)
        refusal({}, form, name='<odd>')
        refusal(prop(type='integer', multipleOf=99991), form)
    for schema in (dict(anyOf=[{'type': 'string'}, {'type': 'integer', 'minimum': 5}]), dict(type='string', pattern='a$|b'), dict(enum=['1', 1]), dict(enum=['</parameter>']), {'type': 'string', 'not': {}}): refusal(prop(**schema), 'qwen_xml')

def test_choices_of_tools():
    markup = Markup('', '', 'hermes')
    assert tool_grammar(TOOLS, 'none', True, markup) is None and tool_grammar(TOOLS, 'auto', True, markup) is None
    assert tool_grammar(TOOLS, {'type': 'function', 'function': {'name': 'now'}}, True, markup) == tool_grammar(TOOLS, 'now', True, markup)
    for tools, choice, how in ((TOOLS, 'nobody', markup), ([], 'required', markup), (TOOLS, 'required', Markup())):
        with pytest.raises(RequestError): tool_grammar(tools, choice, True, how)

@pytest.mark.parametrize('form', ['hermes', 'qwen_xml'])
@pytest.mark.parametrize('content', [Grammar('json_schema', SCHEMAS['flat']), Grammar('json_object'), Grammar('regex', '[0-9]{3}/a'), Grammar('lark', 'start: "yes" | x\nx: "no"'), Grammar('gbnf', 'root ::= [0-9]+ "a"')])
def test_a_call_or_an_answer_of_a_form(compiler, tokenizer, form, content):
    "With tools on offer and a format for the answer: either, and nothing else"
    markup, calls, others = Markup('', '', form), 0, []
    params = SamplingParams(grammar=tool_grammar(TOOLS, 'auto', True, markup, content=content))
    alone = compiler.rules(SamplingParams(grammar=content)).start().allowed()
    first = compiler.rules(params).start().allowed()
    assert (alone & ~first).max() == 0 and unpack_mask(first, tokenizer.vocab_size)[tokenizer.encode('<')[0]]
    for seed in range(6):
        text, how = walk(compiler, params, f'{form}{content.kind}{seed}', most=100)
        parser = OutputParser(markup, tools=TOOLS)
        parser.push(text), parser.finish(cut=how == 'length')
        calls += bool(parser.calls)
        if how == 'end' and not parser.calls: others.append(text)
    for text in others:
        if content.kind == 'json_schema': jsonschema.validate(json.loads(text), SCHEMAS['flat'])
        if content.kind == 'json_object': assert isinstance(json.loads(text), dict)
        if content.kind in ('regex', 'lark', 'gbnf'): assert re.fullmatch(r'[0-9]{3}/a|yes|no|[0-9]+a', text)
    assert calls + len(others) > 1
    with pytest.raises(RequestError) as caught: compiler.compile(tool_grammar(TOOLS, 'auto', True, markup, content=Grammar('json_schema', {'not': {}})))
    assert caught.value.param == 'response_format'

def test_strict_tools_among_free_text():
    "Text as the model likes, and calls that keep to the schema of tools that are strict; where calls begin with a token of their own"
    class Marked(TinyTokenizer):
        CONTROL = (*TinyTokenizer.CONTROL, '<tool_call>', '</tool_call>')
    compiler, markup = GrammarCompiler(Marked('{"name": "', '", "arguments": ')), Markup('', '', 'hermes')
    tools = [{'type': 'function', 'function': {**TOOLS[0]['function'], 'strict': True}}, TOOLS[1]]
    constraint = compiler.rules(SamplingParams(grammar=tool_grammar(tools, 'auto', True, markup))).start()
    bits = lambda: unpack_mask(constraint.allowed(), compiler.tokenizer.vocab_size)
    said = compiler.tokenizer.encode('I look. <tool_call>\n{"name": "sky", "arguments": {"at": "Oslo", "unit": "C"}}\n</tool_call>', special=True)
    for token in said:
        assert bits()[token], compiler.tokenizer.decode([token], skip_special=False)
        constraint.accept(token)
    assert bits()[256] and bits()[ord('x')] and not constraint.finished
    constraint = compiler.rules(SamplingParams(grammar=tool_grammar(tools, 'auto', True, markup))).start()
    for token in compiler.tokenizer.encode('<tool_call>\n{"name": "sky", "arguments": {', special=True): constraint.accept(token)
    assert not bits()[ord('}')] and not bits()[256]


# the real model

@pytest.fixture(scope='module')
def smollm2():
    llm = pytest.importorskip('sparkinfer.llm')
    with llm.LLM.load('smollm2', context=512, progress=False) as loaded: yield loaded.engine

def test_smollm2_writes_json_and_calls(smollm2):
    schema = {'type': 'object', 'properties': {'city': {'type': 'string', 'maxLength': 20}, 'population': {'type': 'integer'}}, 'required': ['city', 'population'], 'additionalProperties': False}
    ids = smollm2.encode_chat([dict(role='user', content='Name a city and its population.')])
    free = SamplingParams(temperature=0, max_tokens=12)
    with_rules = [SamplingParams(temperature=0, max_tokens=60, grammar=Grammar('json_schema', schema)), SamplingParams(temperature=0, max_tokens=120, grammar=tool_grammar(TOOLS[:1], 'required', False, Markup('', '', 'hermes')))]
    alone = smollm2.submit(Request(ids, free)).collect()[0].token_ids
    streams = [smollm2.submit(Request(ids, p)) for p in (free, *with_rules)]
    said, json_answer, call_answer = (s.collect()[0] for s in streams)
    assert said.token_ids == alone and not said.text.startswith('{')
    assert json_answer.reason == call_answer.reason == 'stop', (json_answer.text, call_answer.text)
    jsonschema.validate(json.loads(json_answer.text), schema)
    parser = OutputParser(Markup('', '', 'hermes'), tools=TOOLS)
    parser.push(call_answer.text), parser.finish()
    (name, arguments, complete), = parser.calls
    assert complete and name == 'sky'
    jsonschema.validate(json.loads(arguments), TOOLS[0]['function']['parameters'])
