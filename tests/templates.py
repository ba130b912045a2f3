"What test_chat_templates.py and tools/record_templates.py share: templates in the style of large families, and a vocabulary with their markup"
from pathlib import Path
import numpy as np
from sparkinfer.formats.gguf import open_gguf
from sparkinfer.model_store import resolve
from sparkinfer.text.tokenizer import USER_DEFINED

FOLDER = Path(__file__).resolve().parent/'data'/'templates'
RECORD = Path(__file__).resolve().parent.parent/'data'/'reference'/'chat-templates.json'
MARKUP = ('<think>', '</think>', '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>')

def metadata_with_markup() -> dict:
    "SmolLM2's metadata with the markup tokens of a reasoning family added"
    metadata = open_gguf(resolve('smollm2')).metadata
    types = np.concatenate([metadata['tokenizer.ggml.token_type'], np.full(len(MARKUP), USER_DEFINED, np.int32)])
    return dict(metadata) | {'tokenizer.ggml.tokens': [*metadata['tokenizer.ggml.tokens'], *MARKUP], 'tokenizer.ggml.token_type': types}

def source(name: str) -> str:
    "A template of `FOLDER`, or SmolLM2's own"
    return open_gguf(resolve('smollm2')).metadata['tokenizer.chat_template'] if name == 'smollm2' else (FOLDER/f'{name}.jinja').read_text('utf-8')
