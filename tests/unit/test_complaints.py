"""What is wrong with a file is said in plain words, each thing once."""

import pytest
from pydantic import ValidationError

from gateway.complaints import complaints
from gateway.config import Config


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ({}, ["backends: is missing"]),
        ({"backends": [{"url": "http://a:1"}], "servr": {}}, ["servr: unknown key"]),
        ({"backends": [{"url": "http://a:1", "max_in_flight": "many"}]},
         ["backends.0.max_in_flight: must be a whole number, or auto"]),
        ({"backends": ["http://a:1"]}, ["backends.0: must be a mapping with a url, such as {url: http://10.0.0.11:8000}"]),
        ({"backends": [{"url": "http://a:1"}], "embeddings": {"max_batch_items": 0}},
         ["embeddings.max_batch_items: Input should be greater than 0"]),
    ],
)  # fmt: skip
def test_each_complaint_names_its_place(document: object, lines: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(document)
    assert complaints(caught.value) == lines
