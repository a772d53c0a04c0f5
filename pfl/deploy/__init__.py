"""The same run with real parties: the server's loop, a party's worker, and what lies between."""
