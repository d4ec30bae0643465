"""The driver's calls, as far as that goes without a driver: each argument in its place, of its size."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from lmtier.copy.cuda.driver import Driver
from lmtier.copy.cuda.kernels import Geometry, Spread
from lmtier.errors import DeviceError
from tests.copy.test_cuda_kernels import given_as
from tests.copy.test_paging import chunk_ids, engine, make_layout, noise
from tests.cuda_shim import cpu

STREAM = 0x123456789ABCDEF0


def test_a_launch_hands_over_its_grid_and_arguments():
    made, machine = engine(make_layout()), cpu()
    geometry = Geometry(made.layout, made.shard, given_as(made.tensors))
    payload, ids = noise(made.layout.nbytes(made.shard)), chunk_ids(made.layout)
    machine.allow(*made.memory, payload)
    machine.name_memory()
    wanted = payload.copy()
    made.paged().gather(None, ids, wanted)
    driver, function = Driver(machine.library), ctypes.create_string_buffer(b"gather")
    where = geometry.pieces.ctypes.data, [payload.ctypes.data], [np.array([ids], np.int32)]
    for launch in geometry.copies("gather", geometry.layers, *where, Spread(2)):
        driver.launch(ctypes.addressof(function), launch, STREAM)
    assert payload.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("count", [1, 10, 10_000])  # the last one in three batches
def test_copies_are_made_one_by_one_or_in_a_batch_read_in_the_order_of_the_stream(count):
    driver, size = Driver(cpu().library), 10_000 // count
    source, one_by_one, batch = noise(10_000), np.zeros(10_000, np.uint8), np.zeros(10_000, np.uint8)
    for i in range(count):
        at = i * size
        driver.copy(one_by_one.ctypes.data + at, source.ctypes.data + at, size, STREAM)
    listed = np.array(
        [(batch.ctypes.data + i * size, source.ctypes.data + i * size, size) for i in range(count)], np.int64
    )
    driver.copy_batch(listed, STREAM)
    assert one_by_one.tobytes() == batch.tobytes() == source.tobytes()


def test_batches_are_for_devices_that_take_addresses_of_pinned_memory():
    driver = Driver(cpu().library)
    assert [driver.can_batch(device) for device in (6, 7)] == [False, True]


def test_a_thread_that_pins_does_so_beside_captures():
    library, mode = cpu().library, ctypes.c_int(0)
    Driver(library).allow_beside_captures()
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 2


def test_what_the_driver_refuses_is_an_error_with_its_own_words():
    driver, launch, nothing = Driver(cpu().library), next(launches()), np.zeros((1, 3), np.int64)
    for call in (
        lambda: driver.copy(0, 0, 0, 0),
        lambda: driver.copy_batch(nothing, 0),
        lambda: driver.launch(0, launch, 0),
    ):
        with pytest.raises(DeviceError, match=r"invalid argument \(1\)"):
            call()


def launches():
    made = engine(make_layout())
    geometry = Geometry(made.layout, made.shard, given_as(made.tensors))
    ids = [np.array([chunk_ids(made.layout)], np.int32)]
    return geometry.copies("gather", geometry.layers, 0, [0], ids, Spread(1))
