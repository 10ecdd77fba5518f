"""A dataset larger than the budget stays on disk: clients read their own rows when they train."""

import numpy as np
import torch
from conftest import TINY

from fedhpro.config import configure
from fedhpro.data.clients import Part, cut
from fedhpro.data.sources import Domain, Source, Split
from fedhpro.federation import Federation


def test_clients_of_a_mapped_source_hold_rows_not_samples(tmp_path, tiny_source):
    domain = tiny_source.domains[0]
    np.save(tmp_path / "x.npy", domain.train.x.numpy())
    mapped = Split(torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c")), domain.train.y)
    on_disk = Source("tiny", (Domain("dark", mapped, mapped, domain.test, False, ""),), tiny_source.classes, {}, crop=1)
    in_memory = Source("tiny", (domain,), tiny_source.classes, {}, crop=1)
    clients = cut(on_disk, scenario="iid", seed=0, clients=3)
    for client in clients:
        assert isinstance(client.train, Part) and client.train.pool.x.data_ptr() == mapped.x.data_ptr()
    results = []
    for source in (on_disk, in_memory):
        with Federation(configure(**(TINY | {"scenario": "iid", "clients": 3})), source) as federation:
            results.append(list(federation.rounds()))
    assert results[0] == results[1]
