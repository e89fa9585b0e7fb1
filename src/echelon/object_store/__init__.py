"""Objects in `s3://`, `gs://` and behind `https://`.

Programs call the functions of `client.py`. They are carried out by a process of its own
(`store_process.py`), the only one that imports obstore.
"""
