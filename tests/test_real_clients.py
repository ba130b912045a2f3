"""One conversation with a real model through every client: the same answer, the same number of tokens, and streams that add up to the whole"""
import json
import anthropic, httpx, ollama, openai, pytest
from jsonschema import validate
from sparkinfer.llm import load_engine, open_model
from sparkinfer.serve.app import background_server

SYSTEM, QUESTION, LIMIT = 'You are a helpful assistant.', 'Name three primary colours, and say "Grüße" 👋.', 24
MESSAGES = [dict(role='system', content=SYSTEM), dict(role='user', content=QUESTION)]

@pytest.fixture(scope='module')
def url():
    with background_server(lambda report: load_engine(open_model('smollm2', False), context=1024, slots=4)[0]) as state: yield state.url

def openai_client(url): return openai.OpenAI(base_url=f'{url}/v1', api_key='x', max_retries=0)

def chat(url):
    a = openai_client(url).chat.completions.create(model='m', messages=MESSAGES, max_tokens=LIMIT, temperature=0)
    return a.choices[0].message.content, a.usage.prompt_tokens, a.usage.completion_tokens, a.choices[0].finish_reason == 'length'

def chat_stream(url):
    chunks = list(openai_client(url).chat.completions.create(model='m', messages=MESSAGES, max_tokens=LIMIT, temperature=0, stream=True, stream_options=dict(include_usage=True)))
    text = ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)
    return text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens, [c.choices[0].finish_reason for c in chunks if c.choices][-1] == 'length'

def responses(url):
    a = openai_client(url).responses.create(model='m', instructions=SYSTEM, input=QUESTION, max_output_tokens=LIMIT, temperature=0)
    return a.output_text, a.usage.input_tokens, a.usage.output_tokens, a.status == 'incomplete'

def responses_stream(url):
    events = list(openai_client(url).responses.create(model='m', instructions=SYSTEM, input=QUESTION, max_output_tokens=LIMIT, temperature=0, stream=True))
    text, last = ''.join(e.delta for e in events if e.type == 'response.output_text.delta'), events[-1].response
    return text, last.usage.input_tokens, last.usage.output_tokens, events[-1].type == 'response.incomplete'

def anthropic_client(url): return anthropic.Anthropic(base_url=url, api_key='x', max_retries=0)
ANTHROPIC = dict(model='m', system=SYSTEM, messages=MESSAGES[1:], max_tokens=LIMIT, extra_body=dict(temperature=0))

def messages(url):
    a = anthropic_client(url).messages.create(**ANTHROPIC)
    return ''.join(b.text for b in a.content), a.usage.input_tokens, a.usage.output_tokens, a.stop_reason == 'max_tokens'

def messages_stream(url):
    with anthropic_client(url).messages.stream(**ANTHROPIC) as stream: text, a = ''.join(stream.text_stream), stream.get_final_message()
    return text, a.usage.input_tokens, a.usage.output_tokens, a.stop_reason == 'max_tokens'

def of_ollama(url):
    a = ollama.Client(url).chat('m', MESSAGES, options=dict(temperature=0, num_predict=LIMIT))
    return a.message.content, a.prompt_eval_count, a.eval_count, a.done_reason == 'length'

def of_ollama_stream(url):
    parts = list(ollama.Client(url).chat('m', MESSAGES, options=dict(temperature=0, num_predict=LIMIT), stream=True))
    return ''.join(p.message.content for p in parts), parts[-1].prompt_eval_count, parts[-1].eval_count, parts[-1].done_reason == 'length'

def lmstudio(url):
    a = httpx.post(f'{url}/api/v0/chat/completions', json=dict(model='m', messages=MESSAGES, max_tokens=LIMIT, temperature=0), timeout=120).json()
    return a['choices'][0]['message']['content'], a['usage']['prompt_tokens'], a['usage']['completion_tokens'], a['choices'][0]['finish_reason'] == 'length'

@pytest.fixture(scope='module')
def first(url): return chat(url)

@pytest.mark.parametrize('ask', [chat_stream, responses, responses_stream, messages, messages_stream, of_ollama, of_ollama_stream, lmstudio], ids=lambda f: f.__name__)
def test_every_client_hears_the_same_and_counts_the_same(url, first, ask):
    "A dialect that renders the conversation otherwise has another prompt: other tokens, and soon another answer"
    assert first[2] == LIMIT and first[3] and len(first[0]) > 40
    assert ask(url) == first

def test_prompts_are_counted_alike_before_they_are_read(url, first):
    counts = [anthropic_client(url).messages.count_tokens(model='m', system=SYSTEM, messages=MESSAGES[1:]).input_tokens, httpx.post(f'{url}/v1/tokenize', json=dict(messages=MESSAGES)).json()['count']]
    assert counts == [first[1]] * 2

SCHEMA = dict(type='object', properties=dict(name=dict(type='string', maxLength=20), age=dict(type='integer', minimum=0, maximum=150)), required=['name', 'age'], additionalProperties=False)
INVENT = [dict(role='user', content='Invent a person. Answer with a name and an age.')]

def test_a_schema_binds_the_answer_in_every_dialect(url):
    made = openai_client(url).chat.completions.create(model='m', messages=INVENT, max_tokens=120, temperature=0, response_format=dict(type='json_schema', json_schema=dict(name='person', schema=SCHEMA))).choices[0]
    answers = {'chat': made.message.content}
    answers['responses'] = openai_client(url).responses.create(model='m', input=INVENT, max_output_tokens=120, temperature=0, text=dict(format=dict(type='json_schema', name='person', schema=SCHEMA))).output_text
    answers['ollama'] = ollama.Client(url).chat('m', INVENT, format=SCHEMA, options=dict(temperature=0, num_predict=120)).message.content
    answers['lmstudio'] = httpx.post(f'{url}/api/v0/chat/completions', json=dict(model='m', messages=INVENT, max_tokens=120, temperature=0, response_format=dict(type='json_schema', json_schema=dict(name='person', schema=SCHEMA))), timeout=120).json()['choices'][0]['message']['content']
    for dialect, text in answers.items(): validate(json.loads(text), SCHEMA)
    assert len(set(answers.values())) == 1, answers
