"""Record what transformers makes of chat templates: data/reference/chat-templates.json.

    python tools/record_templates.py data/reference/chat-templates.json

Needs the [parity] extra. Each case is a template, a chat as clients send it, tools and variables; the record holds the text that `apply_chat_template` gives, or the message with which the template
refuses, and a digest of the token ids. tests/test_chat_templates.py reads it. The templates lie in tests/data/templates; `smollm2` is that model's own."""
import hashlib, importlib.metadata, json, sys, tempfile
from pathlib import Path
import jinja2
from transformers import PreTrainedTokenizerFast
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tests'))
from templates import metadata_with_markup, source
from sparkinfer.models.convert import write_hf_tokenizer

def call(name, arguments, id='c1'): return {'id': id, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
def user(text): return {'role': 'user', 'content': text}
def tool(text, id='c1'): return {'role': 'tool', 'tool_call_id': id, 'content': text}
NULLS = {'refusal': None, 'annotations': None, 'audio': None, 'function_call': None, 'tool_calls': None}

CHATS = {
    'question': [user('What is the capital of France?')],
    'system': [{'role': 'system', 'content': 'Be brief. Réponds en français.'}, user('Hi')],
    'turns': [{'role': 'system', 'content': 'Be brief.'}, user('Hi'), {'role': 'assistant', 'content': 'Hello.'} | NULLS, user('  How are you?\n')],
    'thought': [user('2 + 2?'), {'role': 'assistant', 'reasoning_content': '\nTwo and two.\n\nFour.\n', 'content': '4'}, user('And one more?')],
    'thought in two names': [user('2 + 2?'), {'role': 'assistant', 'reasoning': 'Four.', 'reasoning_content': None, 'content': '4'}, user('And one more?')],
    'thought inline': [user('2 + 2?'), {'role': 'assistant', 'content': '<think>\nFour.\n</think>\n\n4'}, user('And one more?')],
    'thought last': [user('2 + 2?'), {'role': 'assistant', 'reasoning_content': 'Four.', 'content': '4'}],
    'empty thought': [user('2 + 2?'), {'role': 'assistant', 'reasoning_content': '', 'content': '4'}, user('And?')],
    'one call': [user('Weather in Zürich?'), {'role': 'assistant', 'reasoning_content': 'I look it up.', 'content': None, 'tool_calls': [call('weather', '{"city": "Zürich", "days": 2}')]}, tool('{"t": "−3 °C"}')],
    'calls': [user('Oslo and 東京?'), {'role': 'assistant', 'reasoning_content': 'Two calls.', 'content': 'Both at once.', 'tool_calls': [
                  call('weather', '{"city": "Oslo", "unit": {"name": "C", "exact": true}}'), call('weather', {'city': '東京', 'hours': [6, 12.5, None], 'note': 'say "hi" <b>\n& \'go\''}, 'c2')]},
              tool('−3'), tool('12', 'c2'), {'role': 'assistant', 'content': 'Cold and mild.'}, user('Thanks')],
    'steps': [user('First?'), {'role': 'assistant', 'reasoning_content': 'Old.', 'content': 'Done.'}, user('Now really.'), {'role': 'assistant', 'reasoning_content': 'Step one.', 'content': '', 'tool_calls': [call('weather', '{"city": "Bern"}')]},
              tool('5'), {'role': 'assistant', 'reasoning_content': 'Step two.', 'content': 'More.', 'tool_calls': [call('nothing', '')]}, tool('')],
    'system only': [{'role': 'system', 'content': 'Be brief.'}],
    'tools only': [tool('5')],
    'late system': [user('Hi'), {'role': 'system', 'content': 'Be brief.'}, user('So?')],
    'cards': [user([{'type': 'text', 'text': 'One line.'}])],
}
TOOLS = [{'type': 'function', 'function': {'name': 'weather', 'description': "The weather, as in “Wie ist's?” <now> & then", 'parameters': {'type': 'object', 'required': ['city'], 'properties': {
              'city': {'type': 'string', 'description': '都市'}, 'days': {'type': 'integer', 'minimum': 1}, 'unit': {'type': 'object', 'properties': {'name': {'enum': ['C', 'F']}, 'exact': {'type': 'boolean', 'default': False}}},
              'hours': {'type': 'array', 'items': {'anyOf': [{'type': 'number'}, {'type': 'null'}]}}}}}},
         {'type': 'function', 'function': {'name': 'nothing', 'parameters': {}}}]
THINKING = ({}, {'enable_thinking': True}, {'enable_thinking': False})
PLANS = [('smollm2', chat, False, [{}]) for chat in ('question', 'system', 'turns', 'cards')]
for template in ('hermes_thinking', 'xml_thinking', 'xml_effort'):
    PLANS += [(template, chat, False, THINKING if chat == 'question' else [{}]) for chat in CHATS if chat != 'cards']
    PLANS += [(template, chat, True, [{}]) for chat in ('question', 'system', 'one call', 'calls', 'steps')]
PLANS += [('xml_thinking', chat, False, [{'preserve_thinking': True}]) for chat in ('thought', 'thought inline', 'steps')]
PLANS += [('xml_effort', chat, False, [{'preserve_thinking': False}]) for chat in ('thought', 'steps')]
PLANS += [('xml_effort', 'system', True, [{'reasoning_effort': effort} for effort in ('low', 'medium', 'xhigh', 'high')] + [{'reasoning_effort': 'low', 'enable_thinking': False}])]

def as_templates_want(message):
    "A message as Hugging Face's documents have it: text, an object for arguments, no nulls, reasoning under one name"
    found = {key: value for key, value in message.items() if value is not None}
    if isinstance(found.get('content'), list): found['content'] = ''.join(part['text'] for part in found['content'])
    if 'reasoning' in found: found['reasoning_content'] = found.pop('reasoning')
    if found.get('content', '').startswith('<think>\n'): found['reasoning_content'], found['content'] = found['content'].removeprefix('<think>\n').split('\n</think>\n\n')
    calls = [c | {'function': c['function'] | {'arguments': json.loads(a or '{}') if isinstance(a := c['function']['arguments'], str) else a}} for c in found.get('tool_calls', ())]
    return found | {'content': found.get('content', '')} | ({'tool_calls': calls} if calls else {})

def render(tokenizer, template, chat, tools, variables, prompt):
    "{'text', 'ids': [count, digest]} or {'raises'}"
    options = dict(chat_template=source(template), tools=TOOLS if tools else None, add_generation_prompt=prompt, **variables)
    messages = [as_templates_want(m) for m in CHATS[chat]]
    try: text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except jinja2.TemplateError as error: return {'raises': str(error)}
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return {'text': text, 'ids': [len(ids), hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]]}

def main(target):
    with tempfile.TemporaryDirectory() as folder:
        write_hf_tokenizer(metadata_with_markup(), Path(folder))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        cases = [dict(template=template, chat=chat, tools=tools, variables=variables, prompt=prompt) | render(tokenizer, template, chat, tools, variables, prompt)
                 for template, chat, tools, each in PLANS for variables in each for prompt in ((True, False) if chat in ('thought last', 'steps') else (True,))]
    about = dict(command='python tools/record_templates.py data/reference/chat-templates.json', versions={p: importlib.metadata.version(p) for p in ('transformers', 'tokenizers', 'jinja2')})
    Path(target).write_text(json.dumps(dict(about=about, tools=TOOLS, chats=CHATS, cases=cases), indent=1, ensure_ascii=False) + '\n', 'utf-8')
    print(f'{len(cases)} cases, {sum("raises" in c for c in cases)} of them refused')

if __name__ == '__main__': main(*sys.argv[1:])
