"""Methods for clients with networks of their own (`models.Family`)."""
