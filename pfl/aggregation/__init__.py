"""What stands between the clients' messages and the server: privacy."""
