"""`ssd draft-server`: drafts for several engines from one process."""
