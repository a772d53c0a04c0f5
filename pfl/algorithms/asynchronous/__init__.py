"""The server moves as soon as updates arrive, without rounds in which all wait."""
