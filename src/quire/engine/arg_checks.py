def check(args):
    pass
