def add_engine_flags(parser, cls):
    pass
