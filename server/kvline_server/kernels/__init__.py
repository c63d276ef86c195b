"""The operations under the model, by backend; worker/backend.py chooses one."""
