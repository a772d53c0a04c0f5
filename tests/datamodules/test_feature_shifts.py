"""Transforms that make the images of clients differ, beside plain implementations in NumPy."""

import math

import numpy as np
import torch

from datamodules import ClientBlur, ClientColour, ClientInversion, ClientNoise, ClientRotation
from tests.draws import CLIENTS, IMAGES, INDEX, OWNERS, N, bound, choice_of, client_key, uniform_of


def test_quarter_turns_of_square_images_are_exact():
    images = IMAGES[:, :, :, :7]
    seen = bound(ClientRotation(), images=images)(images, OWNERS, INDEX)
    turns = [choice_of(client_key(client, 0), 4) for client in range(CLIENTS)]
    assert len(set(turns)) > 2
    for i in range(N):
        assert np.array_equal(seen[i], np.rot90(images[i], turns[i % CLIENTS], (1, 2)))


def test_rotation_interpolates_linear_images_exactly():
    """A rotated ramp a x + b y is the ramp at the rotated coordinates, where these are inside."""
    size, degrees, a, b = 11, 30, 0.3, -0.2
    up, right = 5 - np.arange(size)[:, None], np.arange(size)[None] - 5
    ramp = torch.from_numpy(a * right + b * up)[None, None]
    seen = bound(ClientRotation([degrees]), images=ramp)(ramp, OWNERS[:1], INDEX[:1])[0, 0]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # A point of the result comes from the point turned back, clockwise.
    x, y = cos * right + sin * up, -sin * right + cos * up
    inside = (np.abs(x) <= 5) & (np.abs(y) <= 5)
    expected = np.where(inside, a * x + b * y, 0)
    np.testing.assert_allclose(seen.numpy()[inside], expected[inside], atol=1e-6)
    outside = (np.abs(x) >= 6) | (np.abs(y) >= 6)
    assert outside.any() and (seen.numpy()[outside] == 0).all()


def test_inversion_and_colour_follow_the_client():
    seen = bound(ClientInversion(0.4))(IMAGES, OWNERS, INDEX)
    inverted = [uniform_of(client_key(client, 0)) < 0.4 for client in range(CLIENTS)]
    assert 0 < sum(inverted) < CLIENTS
    for i in range(N):
        expected = 1 - IMAGES[i] if inverted[i % CLIENTS] else IMAGES[i]
        assert torch.equal(seen[i], expected)
    seen = bound(ClientColour(0.5))(IMAGES, OWNERS, INDEX).numpy()
    assert seen.min() == 0 and seen.max() == 1
    for i in range(N):
        drawn = [uniform_of(client_key(i % CLIENTS, 0), number) for number in range(6)]
        change = (2 * np.array(drawn) - 1) * 0.5  # three factors, then three shifts
        factor, shift = 1 + change[:3, None, None], change[3:, None, None]
        expected = np.clip(IMAGES[i].numpy() * factor + shift, 0, 1)
        np.testing.assert_allclose(seen[i], expected, atol=1e-6)


def test_blur_is_a_convolution_with_a_gaussian():
    sigmas = [0.0, 0.8]
    seen = bound(ClientBlur(sigmas))(IMAGES, OWNERS, INDEX).numpy()
    radius = 3  # 3 * 0.8, rounded up
    chosen = [choice_of(client_key(client, 0), 2) for client in range(CLIENTS)]
    assert set(chosen) == {0, 1}
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / 0.8) ** 2)
    weights /= weights.sum()
    for i in range(N):
        image = IMAGES[i].numpy()
        if chosen[i % CLIENTS] == 0:
            assert np.array_equal(seen[i], image)
            continue
        padded = np.pad(
            image.astype(np.float64), [(0, 0), (radius, radius), (radius, radius)], "edge"
        )
        expected = np.zeros_like(image, np.float64)
        for down, first in enumerate(weights):
            for right, second in enumerate(weights):
                expected += first * second * padded[:, down : down + 7, right : right + 9]
        np.testing.assert_allclose(seen[i], expected, atol=1e-6)


def test_noise_grows_with_the_client_and_stays_with_the_sample():
    level, clients, features = 0.3, 5, 8000
    zeros = torch.zeros(clients, features)
    pipeline = bound(ClientNoise(level), images=zeros, clients=clients)
    ids, index = torch.arange(clients), torch.zeros(clients, dtype=torch.int64)
    noise = pipeline(zeros, ids, index)
    # NIID-Bench: the variance of client i of M, counted from 1, is level i / M. Five standard
    # errors of a variance of 8,000 draws are 5 sqrt(2 / 8000) = 8 %.
    expected = level * np.arange(1, clients + 1) / clients
    np.testing.assert_allclose(noise.square().mean(1), expected, rtol=0.08)
    assert torch.equal(noise, pipeline(zeros, ids, index, torch.arange(clients)))  # in training
    other = pipeline(zeros, ids, index + 1)
    correlation = np.corrcoef(noise[4], other[4])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(features)  # five standard errors
