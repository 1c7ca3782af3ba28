"""utils/op_status.py: the table follows the reports."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.python.ops.test_topk_renorm" name="test_topk_renorm_e6_empty"/>
<testcase classname="tests.python.ops.test_topk_renorm" name="test_route_scale">
<failure/></testcase>
<testcase classname="tests.python.ops.test_op_gradients" name="test_z_loss_gradient"/>
<testcase classname="tests.python.ops.test_torch_library" name="test_opcheck[topk_renorm]"/>
<testcase classname="tests.python.gpu.x" name="test_router_logits"><skipped/></testcase>
<testcase classname="moe-mlir.Conversion/MoEToCPU" name="topk-renorm.mlir"/>
</testsuite></testsuites>"""


def run(*args):
    command = [sys.executable, str(ROOT / "utils" / "op_status.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def row(text, op):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {op} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_counts_what_passed_and_what_failed(tmp_path):
    report, out = tmp_path / "pytest.xml", tmp_path / "docs" / "OpStatus.md"
    report.write_text(REPORT)
    result = run(out, report, tmp_path / "absent.xml")
    assert result.returncode == 0, result.stderr
    text = out.read_text()
    names = row(text, "op")
    topk = dict(zip(names, row(text, "topk_renorm")))
    assert (topk["kernel"], topk["torch"], topk["IR"]) == ("1/2", "1", "1")
    assert topk["edge rules"] == "E6"
    assert dict(zip(names, row(text, "z_loss")))["gradient"] == "1"
    assert not any(row(text, "router_logits")[1:])


def test_no_report_is_an_error(tmp_path):
    result = run(tmp_path / "OpStatus.md", tmp_path / "absent.xml")
    assert result.returncode == 1 and "run ./test" in result.stderr
