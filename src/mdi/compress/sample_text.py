"""A text for calibration: short pieces of many kinds, so that a column which is large for any of them is seen."""

SAMPLE_TEXT = """\
The harbour was quiet when the first boats came in. Two men carried a crate of mackerel up the steps, and a woman in a yellow
coat counted the boxes aloud: eleven, twelve, thirteen. "That is one too few," she said. Nobody answered her.

Question: A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?
Answer: 210 / 84 = 2.5 hours, so it arrives at 12:10.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

Water boils at 100 degrees Celsius at sea level, but at about 90 degrees on a mountain of 3,000 metres, because the air presses
less upon it. Cooks in La Paz know this: beans take twice as long.

Der alte Leuchtturm stand noch, doch sein Licht war seit Jahren aus. La lumière du matin entrait par la fenêtre ouverte.
El perro duerme bajo la mesa; nadie lo despierta.

{"name": "sensor-7", "readings": [21.5, 21.7, 22.0], "unit": "C", "ok": true}

Dear Ms. Okafor, thank you for your letter of 3 May. We have looked into the delay and found that the parcel was sent to the
wrong depot. It will reach you by Friday. Please accept our apologies, and the enclosed voucher.

In 1905 a clerk at the patent office in Bern published four papers. One explained why light that falls on metal can set
electrons free; another, why grains of pollen tremble in water; the third changed what we mean by time.

SELECT city, COUNT(*) AS n FROM visits WHERE year >= 2019 GROUP BY city ORDER BY n DESC LIMIT 10;

- Preheat the oven to 180 degrees.
- Whisk three eggs with 150 g of sugar until pale.
- Fold in the flour; do not stir.

The committee voted seven to two in favour of the bridge. Critics pointed out that the river had flooded the same meadow in
1987, 2002 and again last spring; the engineers replied that the piers would stand on rock.
"""
