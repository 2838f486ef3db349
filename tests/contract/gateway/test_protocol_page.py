"""docs/producer-protocol.md names everything that the schema has."""

import re

from tests.helpers.gateway_run import ROOT
from vime.gateway.app import openapi

PAGE = (ROOT / "docs" / "producer-protocol.md").read_text()
SPANS = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_the_page_names_every_call_field_and_error_code_of_the_schema():
    document = openapi()
    calls = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert calls - SPANS == set()
    schemas = document["components"]["schemas"]
    fields = {f"{name}.{field}" for name, schema in schemas.items() for field in schema.get("properties", {})}
    assert len(fields) > 70
    assert {field for field in fields if field.split(".")[1] not in SPANS} == set()
    codes = set(schemas["ErrorBody"]["properties"]["code"]["enum"])
    assert len(codes) == 24
    named = set(re.findall(r"\b(?:\d{3}) `(\w+)`", PAGE))
    assert (codes - named, named - codes) == (set(), set())


def test_the_page_names_no_call_that_is_not_there():
    named = {span for span in SPANS if re.match(r"(GET|POST) /v1/", span)} - {"GET /v1/openapi.json"}
    document = openapi()
    calls = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert named <= calls
