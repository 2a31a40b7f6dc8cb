"""Learning without a server: signed updates in a log that everybody can verify, and a committee that reviews them."""
