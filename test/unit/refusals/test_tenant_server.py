# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.refusals.tenant_server import FLAG, TenantFacts, file_refusal, misfit_refusal, tenant_refusals


def test_server_when_it_can_keep_tenants_apart_then_no_line():
    assert tenant_refusals(TenantFacts()) == []


@pytest.mark.parametrize(
    ("facts", "flag", "way_out"),
    [
        (TenantFacts(shares=False), "--banyan-share off", "--banyan-share index"),
        (TenantFacts(is_embedding=True), "--is-embedding", "a server of its own"),
        (TenantFacts(speaks_grpc=True), "--grpc-port", "serve HTTP"),
    ],
)
def test_server_when_it_cannot_then_one_line_with_the_flags_and_the_way_out(facts, flag, way_out):
    (line,) = tenant_refusals(facts)
    assert FLAG in line and flag in line and way_out in line


def test_secret_when_it_cannot_be_used_then_the_line_names_flag_and_file():
    assert file_refusal(path="/a", error="chmod 600") == f"{FLAG} /a: chmod 600"


def test_sglang_when_banyan_does_not_fit_then_a_server_with_tenants_does_not_start_without_it():
    assert "install the SGLang" in misfit_refusal("another body")
