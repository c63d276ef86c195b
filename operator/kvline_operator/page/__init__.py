"""The read-only web page: what the board holds, as HTML. No form, no script of others, no write."""
