"""Runs tasks made here over a server (MDI_URL) as lm-eval's `local-completions`, and prints what it found as JSON. It runs in
`.venv-lm-eval`, offline.

MDI_TOKENIZER is a folder with the model's tokenizer, MDI_DOCUMENTS a file with a JSON object in each line.
"""

import json
import os

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import lm_eval
from lm_eval.api.task import ConfigurableTask

COMMON = {
    "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": os.environ["MDI_DOCUMENTS"]}}, "test_split": "test",
}  # fmt: skip
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "writing": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip

model = {
    "model": os.environ["MDI_MODEL"], "base_url": os.environ["MDI_URL"] + "/v1/completions",
    "tokenizer": os.environ["MDI_TOKENIZER"], "tokenizer_backend": "huggingface", "max_length": 200, "num_concurrent": 2,
}  # fmt: skip
tasks = [ConfigurableTask(config={"task": name, **COMMON, **config}) for name, config in TASKS.items()]
found = lm_eval.simple_evaluate(
    "local-completions", model_args=model, tasks=tasks, batch_size=4, bootstrap_iters=0, log_samples=True
)
print(
    json.dumps(
        {
            name: {
                "responses": [one["resps"] for one in found["samples"][name]],
                "results": {key: value for key, value in found["results"][name].items() if isinstance(value, float)},
            }
            for name in TASKS
        }
    )
)
