"""Test protocols: which of its samples each client is trained, validated and tested on."""
