"The checkpoints of data/reference/tiny as models that have a tokenizer, since the converter takes no others"
from pathlib import Path
from types import SimpleNamespace

from sparkinfer.formats.safetensors import open_folder
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.convert import write_hf_tokenizer
from sparkinfer.models.synthetic import tokenizer_metadata

TINY = Path(__file__).resolve().parent.parent/'data'/'reference'/'tiny'

def dressed(name, folder, config='config.json'):
    "A folder in `folder` with the weights of checkpoint `name`, its `config`, and a vocabulary of the right size"
    target = Path(folder)/name
    target.mkdir()
    (target/'config.json').write_bytes((TINY/name/config).read_bytes())
    (target/'model.safetensors').symlink_to(TINY/name/'model.safetensors')
    with open_folder(target) as checkpoint: made = ModelConfig.from_checkpoint(checkpoint)
    write_hf_tokenizer(tokenizer_metadata(SimpleNamespace(architecture=made.architecture, vocab=made.vocab_size)) | {'general.architecture': made.architecture}, target)
    return target
