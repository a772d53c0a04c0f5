"""Methods for clients with networks of their own (`pfl.models.Family`)."""
