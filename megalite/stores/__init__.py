"""Object stores: S3, Google Cloud Storage, Azure Blob Storage and other file systems of fsspec.

Start at url.py, which says what names a store, and object_store.py, which reads and writes objects.
Nothing here is imported by a run whose paths are local, and fsspec only by the first access to a store.
May import megalite.config.
"""
