"""Files as data: one module per format, each with a `SampleReader` (`reader.py`)."""
