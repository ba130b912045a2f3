"""A conversation that ends with the assistant's words: in every API the answer goes on with them, by the model's own template, and what comes back is new text only. Real clients against a live server."""
import json
import anthropic, httpx, ollama, openai, pytest
from dialects import call, engine, serving
from support import TEMPLATE, thinking_template

SAID = 'It is '
HEARD = []

def reply(prompt):
    "What the model says, told by how its prompt ends"
    if not HEARD or HEARD[-1] != prompt: HEARD.append(prompt)
    ends = {'It is ': 'four.\n\nOr <think> so.', 'It is four': '', '<think>\nHm': ' hm.\n</think>\n\nFour.', '<think>\n': 'Well.\n</think>\n\nAnew.', 'I look. ': call('clock'), '{"n": ': '4}'}
    return next((text for end, text in ends.items() if prompt.endswith(end)), 'ok')

@pytest.fixture(scope='module')
def server():
    with serving(engine(reply, opens=True)) as state: yield state

@pytest.fixture(scope='module')
def client(server):
    with openai.OpenAI(base_url=server.url + '/v1', api_key='none') as c: yield c

@pytest.fixture(scope='module')
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key='none') as c: yield c

def talk(said=SAID, **more): return [dict(role='user', content='2 + 2?'), dict(role='assistant', content=said, **more)]

def asked(client, messages, **knobs):
    "The answer, streamed and whole"
    knobs = dict(dict(model='m', messages=messages, temperature=0, max_tokens=100), **knobs)
    whole = client.chat.completions.create(**knobs)
    parts = [c.choices[0].delta for c in client.chat.completions.create(**knobs, stream=True) if c.choices]
    message = whole.choices[0].message
    assert ''.join(p.content or '' for p in parts) == (message.content or '') and ''.join(getattr(p, 'reasoning_content', None) or '' for p in parts) == (getattr(message, 'reasoning_content', None) or '')
    return whole

def test_openai(client):
    answer = asked(client, talk())
    assert answer.choices[0].message.content == 'four.\n\nOr <think> so.' and not hasattr(answer.choices[0].message, 'reasoning_content')
    assert HEARD[-1].endswith('<|user|>2 + 2?<|assistant|>It is ')
    assert answer.usage.completion_tokens == len('four.\n\nOr <think> so.') - len('<think>') + 1 + 1 and answer.usage.completion_tokens_details.reasoning_tokens == 0      # and the end
    for more in (dict(continue_final_message=True), dict(continue_final_message=True, add_generation_prompt=False)):
        assert asked(client, talk(), extra_body=more).choices[0].message.content == answer.choices[0].message.content
    assert asked(client, talk(), extra_body=dict(add_generation_prompt=True)).choices[0].message.content == 'Anew.'                                                   # vLLM's default, when it is asked for
    assert HEARD[-1].endswith('It is <|assistant|><think>\n')
    assert asked(client, talk('It is four')).choices[0].message.content == ''
    assert [c.message.content for c in client.chat.completions.create(model='m', messages=talk(), temperature=0, n=3).choices] == [answer.choices[0].message.content] * 3
    with pytest.raises(openai.BadRequestError, match='contradict'): client.chat.completions.create(model='m', messages=talk(), extra_body=dict(continue_final_message=True, add_generation_prompt=True))

def test_what_reasoning_does_with_it(client):
    "Words that are content close it; reasoning without content, or an open <think>, goes on; nothing said is nothing begun"
    told = lambda *args, **knobs: (m := asked(client, talk(*args, **knobs)).choices[0].message) and (getattr(m, 'reasoning_content', None), m.content)
    assert told(SAID, reasoning_content='Hm.') == (None, 'four.\n\nOr <think> so.') and HEARD[-1].endswith('<|assistant|><think>\nHm.\n</think>\n\nIt is ')
    assert told('', reasoning_content='Hm') == (' hm.', 'Four.') and HEARD[-1].endswith('<|assistant|><think>\nHm')
    assert told('<think>\nHm') == (' hm.', 'Four.')
    assert told('<think>') == told('<think>\n') == told('') == told(None) == ('Well.', 'Anew.')
    for knobs in (dict(enable_thinking=True), dict(reasoning=dict(max_tokens=0)), dict(enable_thinking=False)):
        assert asked(client, talk(), extra_body=knobs).choices[0].message.content.startswith('four.')
    budget = asked(client, talk('', reasoning_content='Hm'), extra_body=dict(thinking_budget=2))
    assert budget.choices[0].message.reasoning_content == ' h' and budget.usage.completion_tokens_details.reasoning_tokens == 2      # only what is new counts

def test_tools_and_forms_beside_it(client):
    "A call may follow the words; a schema holds for what stands and what comes, together"
    tools = [dict(type='function', function=dict(name='clock', parameters=dict(type='object', properties={})))]
    message = asked(client, talk('I look. '), tools=tools).choices[0].message
    assert [c.function.name for c in message.tool_calls] == ['clock'] and not message.content
    schema = dict(type='json_schema', json_schema=dict(name='n', schema=dict(type='object', properties=dict(n=dict(type='integer')), required=['n'], additionalProperties=False)))
    assert asked(client, talk('{"n": '), response_format=schema).choices[0].message.content == '4}'
    for said in ('Sure: ', '{"m": ', '{"n": 4}'):
        with pytest.raises(openai.BadRequestError, match='last message'): asked(client, talk(said), response_format=schema)
    with pytest.raises(openai.BadRequestError, match='last message'): asked(client, talk(), tools=tools, tool_choice='required')
    called = dict(id='c', type='function', function=dict(name='clock', arguments='{}'))
    assert asked(client, talk('', tool_calls=[called])).choices[0].message.content == 'Anew.'                                                  # its results are missing; as before
    with pytest.raises(openai.BadRequestError, match='calls of tools'): asked(client, talk('', tool_calls=[called]), extra_body=dict(continue_final_message=True))
    with pytest.raises(openai.BadRequestError, match='only a message of the assistant'): asked(client, talk()[:1], extra_body=dict(continue_final_message=True))

def test_it_is_counted_as_it_is_read(client, server):
    used = asked(client, talk()).usage.prompt_tokens
    assert used == asked(client, talk('It is')).usage.prompt_tokens + 1                      # a byte is a token here
    post = lambda path, **body: httpx.post(server.url + path, json=dict(messages=talk(), **body)).json()
    assert post('/v1/tokenize')['count'] == post('/tokenize')['count'] == used
    assert post('/apply-template')['prompt'].endswith('<|assistant|>It is ')
    assert post('/v1/tokenize', add_generation_prompt=True)['count'] == asked(client, talk(), extra_body=dict(add_generation_prompt=True)).usage.prompt_tokens > used
    assert post('/apply-template', add_generation_prompt=False, continue_final_message=False)['prompt'] == post('/apply-template')['prompt']      # this template marks no end
    assert post('/v1/score', completion='four')['usage']['prompt_tokens'] == used
    assert post('/api/v0/chat/completions', max_tokens=1)['usage']['prompt_tokens'] == used

def test_anthropic(claude, client):
    knobs = dict(model='m', max_tokens=100, messages=talk('It is'), extra_body=dict(temperature=0))
    message = claude.messages.create(**knobs)
    with claude.messages.stream(**knobs) as stream: assert [b.text for b in stream.get_final_message().content] == [b.text for b in message.content] == ['ok']
    assert claude.messages.count_tokens(model='m', messages=talk('It is')).input_tokens == message.usage.input_tokens == asked(client, talk('It is')).usage.prompt_tokens
    told = lambda said, **more: claude.messages.create(**dict(knobs, messages=talk(said), **more)).content
    assert [b.text for b in told('{"n":')] == ['ok'] and HEARD[-1].endswith('<|assistant|>{"n":')
    assert [b.text for b in told([dict(type='text', text='It is four')])] == ['']                              # what the model ends at once is an empty text
    assert [b.type for b in told([])] == [b.type for b in told('')] == ['thinking', 'text']                    # an empty one is no beginning
    assert [b.text for b in told('It is', thinking=dict(type='disabled'))] == ['ok']
    for said, more, words in (('It is ', {}, 'white space'), ([dict(type='text', text='a\n')], {}, 'white space'), ([dict(type='thinking', thinking='Hm', signature='s')], {}, 'block of type thinking'),
                              ('It is', dict(thinking=dict(type='enabled', budget_tokens=1024), max_tokens=2000), 'thinking'), ('It is', dict(thinking=dict(type='adaptive')), 'thinking')):
        for ask in (told, lambda said, **more: claude.messages.count_tokens(model='m', messages=talk(said), **{k: v for k, v in more.items() if k != 'max_tokens'})):
            with pytest.raises(anthropic.BadRequestError, match=words): ask(said, **more)

def test_ollama(server, client):
    c = ollama.Client(server.url)
    knobs = dict(model='m', options=dict(temperature=0))
    whole = c.chat(messages=talk(), **knobs)
    assert ''.join(part.message.content or '' for part in c.chat(messages=talk(), stream=True, **knobs)) == whole.message.content == 'four.\n\nOr <think> so.' and not whole.message.thinking
    assert whole.prompt_eval_count == asked(client, talk()).usage.prompt_tokens
    assert c.chat(messages=talk(), think=True, **knobs).message.content == whole.message.content
    goes_on = c.chat(messages=talk('', thinking='Hm'), **knobs).message
    assert (goes_on.thinking, goes_on.content) == (' hm.', 'Four.')

def test_responses_begins_anew(server):
    "Its items are whole: another message follows"
    reply = httpx.post(server.url + '/v1/responses', json=dict(input=talk(), temperature=0)).json()
    assert reply['output'][-1]['content'][0]['text'] == 'Anew.'

def test_a_template_that_does_not_write_the_words():
    from support import scripted_engine
    with serving(lambda report: scripted_engine('x', template='{% for m in messages %}<|{{ m.role }}|>{{ m.content | length }}{% endfor %}<|assistant|>')) as state:
        with openai.OpenAI(base_url=state.url + '/v1', api_key='none') as c:
            with pytest.raises(openai.BadRequestError, match='does not write it out') as e: c.chat.completions.create(model='m', messages=talk())
            assert e.value.code == 'unsupported_prefill'
            assert c.chat.completions.create(model='m', messages=talk(), extra_body=dict(add_generation_prompt=True)).choices[0].message.content == 'x'

def test_a_real_model_goes_on():
    "SmolLM2: the same text as behind the same raw prompt, and it makes sense"
    from sparkinfer.llm import load_engine, open_model
    from sparkinfer.serve.app import ServeSettings, background_server
    with background_server(lambda report: load_engine(open_model('smollm2', False), context=256)[0], ServeSettings(port=0, shutdown_seconds=0.5)) as state, openai.OpenAI(base_url=state.url + '/v1', api_key='none') as c:
        messages = [dict(role='user', content='What is the capital of France?'), dict(role='assistant', content='The capital of France is')]
        answer = c.chat.completions.create(model='m', messages=messages, temperature=0, max_tokens=8)
        assert answer.choices[0].message.content.startswith(' Paris')
        prompt = httpx.post(state.url + '/apply-template', json=dict(messages=messages)).json()['prompt']
        assert prompt.endswith('<|im_start|>assistant\nThe capital of France is')
        raw = c.completions.create(model='m', prompt=prompt, temperature=0, max_tokens=8)
        assert (raw.choices[0].text, raw.usage.prompt_tokens) == (answer.choices[0].message.content, answer.usage.prompt_tokens)
