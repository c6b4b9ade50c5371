"""gpu_check.py where there is no GPU: it says so, and its checks run on the CPU, here one of them."""
import json

import pytest
import torch

import bench
import gpu_check


def test_without_a_gpu_the_check_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    gpu_check.main([])
    assert capsys.readouterr().out.count('\n') == 1


def test_a_check_can_be_rehearsed(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, 'device', 'auto')  # it is set
    monkeypatch.setattr(gpu_check, 'CASES', {'rim stage 2': gpu_check.CASES['rim stage 2']})
    with pytest.raises(SystemExit) as status:
        gpu_check.main(['--rehearse', '--only=kernels', f'--output={tmp_path}/found.json'])
    found = json.loads((tmp_path / 'found.json').read_text())
    assert not status.value.code and found['machine'] == 'CPU'
    assert len(found['checks']) == 2 and all(entry['right'] for entry in found['checks'])
