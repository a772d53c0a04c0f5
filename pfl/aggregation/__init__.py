"""What stands between the clients' messages and the server: privacy, robust rules, attackers."""
