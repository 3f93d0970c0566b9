"""Real text to measure on: in the public domain, of three kinds."""

from __future__ import annotations

from typing import Final

MOBY_DICK: Final = """\
Call me Ishmael. Some years ago—never mind how long precisely—having little or no money in my purse, and nothing \
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is \
a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the \
mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin \
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand \
of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and \
methodically knocking people's hats off—then, I account it high time to get to sea as soon as I can. This is my \
substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to \
the ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or \
other, cherish very nearly the same feelings towards the ocean with me.
"""

GETTYSBURG: Final = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and \
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether \
that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that \
war. We have come to dedicate a portion of that field, as a final resting place for those who here gave their lives \
that that nation might live. It is altogether fitting and proper that we should do this. But, in a larger sense, we \
can not dedicate—we can not consecrate—we can not hallow—this ground. The brave men, living and dead, who struggled \
here, have consecrated it, far above our poor power to add or detract. The world will little note, nor long remember \
what we say here, but it can never forget what they did here.
"""

EUCLID: Final = """\
Proposition 20. Prime numbers are more than any assigned multitude of prime numbers. Let A, B, C be the assigned \
prime numbers; I say that there are more prime numbers than A, B, C. For let the least number measured by A, B, C be \
taken, and let it be DE; let the unit DF be added to DE. Then EF is either prime or not. First, let it be prime; then \
the prime numbers A, B, C, EF have been found which are more than A, B, C. Next, let EF not be prime; therefore it is \
measured by some prime number. Let it be measured by the prime number G. I say that G is not the same with any of the \
numbers A, B, C. For, if possible, let it be so. Now A, B, C measure DE; therefore G also will measure DE. But it \
also measures EF. Therefore G, being a number, will measure the remainder, the unit DF: which is absurd.
"""

TEXTS: Final = (MOBY_DICK, GETTYSBURG, EUCLID)
